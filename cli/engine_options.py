"""Which model runs, in which numbers, and within which limits; and what an engine says of itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Option

from pagedserve.cli.errors import refuse
from pagedserve.cli.policy_options import DEFAULT as DEFAULT_POLICY
from pagedserve.cli.policy_options import PANEL as POLICY_PANEL
from pagedserve.cli.policy_options import EnablePrefixCaching, PolicyOptions, Settings
from pagedserve.cli.run_options import (
    LIMITS_PANEL,
    BlockSize,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    OverlapDepth,
)
from pagedserve.cli.values import one_of, real, whole
from pagedserve.policy import Limits, Policy, policy_names

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
        Option(
            parser=one_of(*DTYPES),
            metavar="|".join(DTYPES),
            help="Numbers to compute in; auto: bfloat16 where the device has it in hardware.",
            rich_help_panel=PANEL,
        ),
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
    attention: Annotated[
        str,
        Option(
            parser=one_of(*ATTENTIONS),
            metavar="|".join(ATTENTIONS),
            help="How attention is computed; auto: the fastest.",
            rich_help_panel=PANEL,
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str,
        Option(
            parser=one_of(*KV_CACHE_DTYPES),
            metavar="|".join(KV_CACHE_DTYPES),
            help="Numbers of the KV cache; fp8 halves its memory, needs attention triton, and is less exact.",
            rich_help_panel=PANEL,
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        Option(
            "--tensor-parallel-size",
            "-tp",
            parser=whole(1),
            metavar="N",
            help="Processes that share the model, each with a GPU of its own, or all on the CPU.",
            rich_help_panel=PANEL,
        ),
    ] = 1
    enforce_eager: Annotated[
        bool, Option("--enforce-eager", help="Record no CUDA graphs.", rich_help_panel=PANEL)
    ] = False
    max_model_len: Annotated[
        int | None,
        Option(
            parser=whole(2),
            metavar="N",
            help="Prompt plus output of one request; the default is the model's own, at most 4096.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None
    max_num_seqs: MaxNumSeqs = 64
    max_num_batched_tokens: MaxNumBatchedTokens = 512
    block_size: BlockSize = 16
    num_blocks: Annotated[
        int | None,
        Option(
            "--num-blocks",
            "--num-gpu-blocks-override",
            parser=whole(1),
            metavar="N",
            help="KV blocks; default: what all requests could use, within 1 GiB and a third of free memory.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Option(
            parser=real(0, above=True, high=1),
            metavar="SHARE",
            help="Share of a GPU's memory to take; what weights and a step leave becomes KV blocks. Default: 0.9.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None

    def check(self) -> None:
        """Refuse limits that contradict each other, before a model is loaded."""
        Limits(self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len or 2, self.block_size)

    def start(self, spec: Policy | None = None, overlap_depth: int = 0, *, is_quiet: bool = False) -> LLM:
        """Load the model, make its engine and settle the heap. ValueError says what does not exist, work or fit."""
        from pagedserve.engine.heap import settle_heap
        from pagedserve.engine.kv_memory import PoolTooLarge
        from pagedserve.engine.llm import LLM

        more: dict[str, Any] = {} if spec is None else {"policy": spec}
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        progress = not is_quiet and sys.stderr.isatty()
        try:
            llm = LLM(**given, overlap_depth=overlap_depth, progress=progress, **more)
        except PoolTooLarge as error:
            refuse(f"--num-blocks{str(error).removeprefix('num_blocks')}")
        settle_heap()
        return llm


@dataclass(frozen=True, slots=True)
class EnginePolicyOptions:
    """The one policy of an engine."""

    policy: Annotated[
        str,
        Option(
            metavar="NAME[,KEY=VALUE...]",
            help=f"One of {', '.join(policy_names())}, perhaps with settings.",
            rich_help_panel=POLICY_PANEL,
        ),
    ] = DEFAULT_POLICY
    settings: Settings = None
    enable_prefix_caching: EnablePrefixCaching = None
    overlap_depth: OverlapDepth = 0

    def chosen(self) -> tuple[str, Policy]:
        """Its label, as written, and the policy. ValueError names what is unknown."""
        options = PolicyOptions([self.policy], self.settings, self.enable_prefix_caching)
        ((label, spec),) = options.chosen().items()
        return label, spec


def tell(lines: Iterable[str], is_quiet: bool = False) -> None:
    """Lines on standard error, which leaves standard output to the results."""
    if not is_quiet:
        for line in lines:
            print(line, file=sys.stderr, flush=True)
