"""Compiles every kernel ahead of time to machine code, without a GPU, and says what it takes of one.

    python -m pagedserve.kernels.build_report [--arch 80 --arch 90] [--json FILE]

For each kernel, model shape and architecture: registers of a thread, shared memory, bytes spilled, and how many
tensor-core instructions are in the code. Triton's own package brings the assembler and the tools that read it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pagedserve.kernels.build_cases import BuildCase, build_cases

ARCHITECTURES = (80, 90, 100)
SHARED_LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that one block may have: NVIDIA's tuning guides for the architectures."""
ALLOWED_SPILLS: dict[tuple[str, str, int], str] = {}
"""Kernel, model and architecture, and why it may spill."""
TENSOR_CORE = re.compile(r"\b(HMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA|UTCIMMA|OMMA|IMMA)\b")


@dataclass(frozen=True, slots=True)
class Built:
    """What one kernel takes. spilled: bytes of local memory of a thread; shared: bytes of a block."""

    kernel: str
    model: str
    arch: int
    registers: int
    shared: int
    spilled: int
    tensor_core: int
    threads: int


def build(case: BuildCase, arch: int) -> Built:
    """Compile one kernel. Triton's own errors come through, and those of its tools."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # As a launch finds them: pointers and strides are multiples of 16, and loads are as wide as that allows.
    places = {name: index for index, name in enumerate(case.signature)}
    aligned = {(places[name],): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(fn=case.kernel, signature=case.signature, constexprs=case.constants, attrs=aligned)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    if case.max_registers is not None:
        options["maxnreg"] = case.max_registers
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage, code = _inspect(compiled.asm["cubin"])
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Built(
        case.name,
        case.model,
        arch,
        numbers["REG"],
        compiled.metadata.shared,
        numbers["STACK"] + numbers["LOCAL"],
        len(TENSOR_CORE.findall(code)),
        32 * compiled.metadata.num_warps,
    )


def _inspect(cubin: bytes) -> tuple[str, str]:
    """Resource usage and assembly of a binary, as `cuobjdump` prints them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _output(tool, "-res-usage", path), _output(tool, "-sass", path)


def _output(tool: Path, *arguments: object) -> str:
    return subprocess.run([tool, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def report(architectures: Sequence[int], cases: Iterable[BuildCase] | None = None) -> list[Built]:
    """Every kernel for every architecture that it is meant for."""
    chosen = build_cases() if cases is None else cases
    return [build(case, arch) for case in chosen for arch in architectures]


def as_table(built: Iterable[Built]) -> str:
    """Lines of equal width."""
    head = f"{'kernel':34} {'model':14} {'sm':>4} {'registers':>9} {'shared':>8} {'spilled':>8} {'tensor core':>11}"
    lines = [
        f"{one.kernel:34} {one.model:14} {one.arch:4} {one.registers:9} {one.shared:8} {one.spilled:8} "
        f"{one.tensor_core:11}"
        for one in built
    ]
    return "\n".join([head, *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 if a kernel spills or takes more shared memory than there is."""
    parser = argparse.ArgumentParser(description="Compile every kernel without a GPU and say what it takes.")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHITECTURES, help="default: all")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    parsed = parser.parse_args(arguments)
    built = report(parsed.arch or ARCHITECTURES)
    print(as_table(built))
    if parsed.json is not None:
        parsed.json.write_text(json.dumps([asdict(one) for one in built], indent=1), encoding="utf-8")
    num_bad = 0
    for one in built:
        reason = ALLOWED_SPILLS.get((one.kernel, one.model, one.arch)) if one.spilled else None
        if reason is not None:
            print(f"{one.kernel} ({one.model}, sm_{one.arch}) may spill: {reason}")
        elif one.spilled or one.shared > SHARED_LIMITS[one.arch]:
            num_bad += 1
            print(
                f"{one.kernel} ({one.model}, sm_{one.arch}) spills, or needs more shared memory than there is"
            )
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
