"""Which model runs, in which numbers, and within which limits; and what an engine says of itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Option

from pagedserve.cli.option_kinds import choice, count, switch
from pagedserve.cli.policy_options import DEFAULT as DEFAULT_POLICY
from pagedserve.cli.policy_options import PANEL as POLICY_PANEL
from pagedserve.cli.policy_options import (
    PRESETS,
    EnablePrefixCaching,
    PolicyOptions,
    PreemptionModeName,
    Settings,
)
from pagedserve.cli.run_options import (
    LIMITS_PANEL,
    BlockSize,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    NumCpuBlocks,
    OverlapDepth,
    memory_share,
    pool_size,
)
from pagedserve.cli.values import real
from pagedserve.engine.host_memory import HostMemory
from pagedserve.policy import Limits, Policy

if TYPE_CHECKING:
    from pagedserve.engine.llm import LLM

PANEL = "Model"
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8")
ATTENTIONS = ("auto", "cpu", "reference", "triton")


def _device(text: Any) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise BadParameter(f"{text!r} is not cpu, cuda or cuda:N")
    return text


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """A model and the limits of its engine, under vLLM's names; None: chosen for the model and the memory."""

    model: Annotated[
        str,
        Option(
            "--model",
            metavar="MODEL",
            help="A directory of safetensors, a .gguf file, smollm2-135m (fetched once), or owner/name.",
            rich_help_panel=PANEL,
        ),
    ]
    dtype: Annotated[
        str,
        choice("Numbers to compute in; auto: bfloat16 where the device has it in hardware.", PANEL, *DTYPES),
    ] = "auto"
    device: Annotated[
        str,
        Option(
            parser=_device,
            metavar="cpu|cuda|cuda:N",
            help="Where the model runs.",
            rich_help_panel=PANEL,
        ),
    ] = "cpu"
    attention: Annotated[str, choice("How attention is computed; auto: the fastest.", PANEL, *ATTENTIONS)] = (
        "auto"
    )
    kv_cache_dtype: Annotated[
        str,
        choice(
            "Numbers of the KV cache; fp8 halves its memory, needs attention triton, and is less exact.",
            PANEL,
            *KV_CACHE_DTYPES,
        ),
    ] = "auto"
    calculate_kv_scales: Annotated[
        bool,
        switch(
            "--calculate-kv-scales",
            "Measure what keys and values are divided by in fp8, where the checkpoint does not say; else 1.",
            PANEL,
        ),
    ] = False
    tensor_parallel_size: Annotated[
        int,
        count(
            "Processes that share the model, each with a GPU of its own, or all on the CPU.",
            PANEL,
            "--tensor-parallel-size",
            "-tp",
        ),
    ] = 1
    enforce_eager: Annotated[bool, switch("--enforce-eager", "Record no CUDA graphs.", PANEL)] = False
    max_model_len: Annotated[
        int | None,
        count(
            "Prompt plus output of one request; the default is the model's own, at most 4096.",
            LIMITS_PANEL,
            low=2,
        ),
    ] = None
    max_num_seqs: MaxNumSeqs = 64
    max_num_batched_tokens: MaxNumBatchedTokens = 512
    block_size: BlockSize = 16
    num_blocks: Annotated[
        int | None,
        pool_size(
            "KV blocks; default: what all requests could use, within 1 GiB and a third of free memory.",
            LIMITS_PANEL,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        memory_share(
            "Share of a GPU's memory to take; what weights and a step leave becomes KV blocks. Default: 0.9.",
            LIMITS_PANEL,
        ),
    ] = None

    def check(self) -> None:
        """Refuse limits that contradict each other, before a model is loaded."""
        Limits(self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len or 2, self.block_size)

    def start(
        self,
        spec: Policy | None = None,
        overlap_depth: int = 0,
        *,
        host: HostMemory | None = None,
        is_quiet: bool = False,
        record: bool = True,
    ) -> LLM:
        """Load the model, make its engine and settle the heap. ValueError says what does not exist, work or fit."""
        from pagedserve.engine.heap import settle_heap
        from pagedserve.engine.llm import LLM

        more: dict[str, Any] = {} if spec is None else {"policy": spec}
        given = {field.name: getattr(self, field.name) for field in fields(self)} | asdict(
            host or HostMemory()
        )
        progress = not is_quiet and sys.stderr.isatty()
        llm = LLM(**given, overlap_depth=overlap_depth, progress=progress, record=record, **more)
        settle_heap()
        return llm


@dataclass(frozen=True, slots=True)
class EnginePolicyOptions:
    """The one policy of an engine."""

    policy: Annotated[
        str,
        Option(
            metavar="NAME[,KEY=VALUE...]",
            help=f"{PRESETS}.",
            rich_help_panel=POLICY_PANEL,
        ),
    ] = DEFAULT_POLICY
    settings: Settings = None
    enable_prefix_caching: EnablePrefixCaching = None
    preemption_mode: PreemptionModeName = None
    num_cpu_blocks: NumCpuBlocks = None
    swap_space: Annotated[
        float | None,
        Option(
            parser=real(0, above=True),
            metavar="GIB",
            help="The same in GiB of each rank.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None
    overlap_depth: OverlapDepth = 0

    @property
    def host(self) -> HostMemory:
        """The memory for swapping."""
        return HostMemory(self.num_cpu_blocks, self.swap_space)

    def chosen(self) -> tuple[str, Policy]:
        """Its label, as written, and the policy. ValueError for what is unknown or does not fit together."""
        options = PolicyOptions(
            [self.policy], self.settings, self.enable_prefix_caching, self.preemption_mode
        )
        ((label, spec),) = options.chosen().items()
        self.host.check(spec)
        return label, spec


def tell(lines: Iterable[str], is_quiet: bool = False) -> None:
    """Lines on standard error, which leaves standard output to the results."""
    if not is_quiet:
        for line in lines:
            print(line, file=sys.stderr, flush=True)
