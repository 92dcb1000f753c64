"""Which number format a device is given, and whether the weights fit its memory."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.errors import NotEnoughMemory

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "avx10_2", "bf16")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A dtype and, for the user to read, why it was chosen."""

    dtype: torch.dtype
    reason: str


def check_device(device: torch.device | str) -> None:
    """Raise ``ValueError`` for a device that torch does not know or that this machine does not have."""
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"device {str(device)!r} is none that torch knows; use cpu, cuda or cuda:N"
        ) from None
    if wanted.type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ValueError(
            f"device {wanted}: torch {torch.__version__} finds no CUDA device; use cpu, or install a torch "
            "built for CUDA and the driver of a GPU"
        )
    if (wanted.index or 0) >= count:
        raise ValueError(f"device {wanted}: there are {count} CUDA devices, the last is cuda:{count - 1}")


def choose_dtype(requested: str | torch.dtype = "auto", device: torch.device | str = "cpu") -> DtypeChoice:
    """Pick bfloat16 where the device multiplies it in hardware, else float32, unless told otherwise.

    Raises ``ValueError`` for a name that is not auto, float32, bfloat16 or float16.
    """
    if isinstance(requested, torch.dtype):
        return DtypeChoice(requested, "as requested")
    if requested in _DTYPES:
        return DtypeChoice(_DTYPES[requested], "as requested")
    if requested != "auto":
        raise ValueError(f"unknown dtype {requested!r}; there are: auto, {', '.join(_DTYPES)}")
    kind = torch.device(device).type
    if kind == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return DtypeChoice(torch.bfloat16, f"GPU of compute capability {major}.{minor} has bfloat16")
        return DtypeChoice(
            torch.float32, f"GPU of compute capability {major}.{minor} lacks bfloat16 (8.0 has it)"
        )
    if kind == "cpu":
        flag = cpu_bfloat16_flag()
        if flag is not None:
            return DtypeChoice(torch.bfloat16, f"CPU has bfloat16 products in hardware ({flag})")
        return DtypeChoice(torch.float32, "CPU has no bfloat16 products in hardware")
    return DtypeChoice(torch.float32, f"nothing is known about bfloat16 on device type {kind!r}")


def cpu_bfloat16_flag() -> str | None:
    """Name the instruction set with which this CPU multiplies bfloat16, or None."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        found = capabilities()
        present = {name for name, value in found.items() if value is True}
    else:
        cpuinfo = Path("/proc/cpuinfo")
        text = cpuinfo.read_text(encoding="ascii", errors="replace") if cpuinfo.exists() else ""
        lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
        present = set(lines[0].split()) if lines else set()
    return next((flag for flag in _BF16_FLAGS if flag in present), None)


def available_bytes(device: torch.device | str) -> int | None:
    """Memory that can be allocated now on ``device``, or None where it cannot be told.

    On a CPU: what the kernel calls available, and no more than is left under the control group's limit.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if kind != "cpu":
        return None
    candidates = [value for value in (_meminfo_available(), _cgroup_left()) if value is not None]
    return min(candidates) if candidates else None


def weight_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> int:
    """Bytes that a loaded model takes. On a CPU a tied head is packed, so the embedding counts twice."""
    numbers = config.num_parameters
    if config.tie_word_embeddings and torch.device(device).type == "cpu":
        numbers += config.vocab_size * config.hidden_size
    return numbers * dtype.itemsize


def check_memory(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
    """Raise ``NotEnoughMemory`` with both numbers when the weights exceed what ``device`` has available."""
    needed, available = weight_bytes(config, dtype, device), available_bytes(device)
    name = str(dtype).removeprefix("torch.")
    if available is not None and needed > available:
        raise NotEnoughMemory(
            f"the weights need {needed:,} bytes ({needed / _GIB:.2f} GiB) in {name}; "
            f"{available:,} bytes ({available / _GIB:.2f} GiB) are available on {device}; "
            "use a smaller model, a narrower dtype, or free memory"
        )


def _meminfo_available() -> int | None:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _cgroup_left(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = (root / "memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return None
    if not (limit.isdigit() and used.isdigit()):
        return None
    return max(0, int(limit) - int(used) + _cached_bytes(root / "memory.stat"))


def _cached_bytes(stat: Path) -> int:
    """Files read once, such as the weights: they count as used, and are dropped when memory runs short."""
    lines = stat.read_text(encoding="ascii").splitlines() if stat.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
