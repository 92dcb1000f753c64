"""Within which limits the policies decide, how the run goes, and what good latency is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from typer import Option

from pagedserve.cli.option_kinds import count, seconds, switch
from pagedserve.cli.values import real, whole
from pagedserve.policy import Limits

LIMITS_PANEL, RUN_PANEL, SLO_PANEL = "Limits", "Run", "Service level objective"
DEFAULTS = Limits()
MaxNumSeqs = Annotated[int, count("Requests running at once.", LIMITS_PANEL)]
MaxNumBatchedTokens = Annotated[int, count("Tokens computed in one step.", LIMITS_PANEL)]
BlockSize = Annotated[int, count("Tokens in a KV block.", LIMITS_PANEL)]
NumCpuBlocks = Annotated[
    int | None, count("KV blocks in host memory, for --preemption-mode swap.", LIMITS_PANEL)
]
OverlapDepth = Annotated[
    int,
    Option(
        parser=whole(0, 1),
        metavar="0|1",
        help="1: schedule a step while the one before runs (vLLM: async scheduling).",
        rich_help_panel=RUN_PANEL,
    ),
]


def pool_size(help: str, panel: str) -> Any:
    """The pool, which vLLM has another name for."""
    return count(help, panel, "--num-blocks", "--num-gpu-blocks-override")


def memory_share(help: str, panel: str) -> Any:
    """--gpu-memory-utilization."""
    return Option(parser=real(0, above=True, high=1), metavar="SHARE", help=help, rich_help_panel=panel)


def declared_limit(panel: str) -> Any:
    """--max-tokens of a replay."""
    return count(
        "Output limit that every request declares; the default is the trace's longest output.", panel
    )


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """The limits of a scheduler but the pool, under vLLM's names."""

    max_num_seqs: MaxNumSeqs = DEFAULTS.max_num_seqs
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens
    max_model_len: Annotated[int, count("Prompt plus output of one request.", LIMITS_PANEL, low=2)] = (
        DEFAULTS.max_model_len
    )
    block_size: BlockSize = DEFAULTS.block_size
    max_num_queued_reqs: Annotated[
        int | None, count("Requests that may wait; more are refused.", LIMITS_PANEL)
    ] = None
    num_cpu_blocks: NumCpuBlocks = None

    def limits(self, num_blocks: int) -> Limits:
        """The limits with that pool. ValueError says which number is wrong."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return Limits(num_blocks=num_blocks, **{**given, "num_cpu_blocks": self.num_cpu_blocks or 0})


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How clients and replica behave."""

    overlap_depth: OverlapDepth = 0
    max_tokens: Annotated[int | None, declared_limit(RUN_PANEL)] = None
    client_timeout: Annotated[
        float | None,
        seconds("A client gives up on a request that has not ended S seconds after it was sent.", RUN_PANEL),
    ] = None
    max_in_flight: Annotated[
        int | None,
        count(
            "Closed loop: a request is sent when it is due and fewer than N are in flight.",
            RUN_PANEL,
            "--max-in-flight",
            "--max-concurrency",
        ),
    ] = None
    check: Annotated[
        bool,
        switch(
            "--check", "Recompute every invariant of scheduler and KV pool after every call; slow.", RUN_PANEL
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class SloOptions:
    """Bounds that a good request keeps, in seconds; they add attainment and goodput to the table."""

    slo_ttft: Annotated[float | None, seconds("Time to first token.", SLO_PANEL)] = None
    slo_tpot: Annotated[float | None, seconds("Time per output token.", SLO_PANEL)] = None
    slo_e2e: Annotated[float | None, seconds("End-to-end latency.", SLO_PANEL)] = None

    def bounds(self) -> dict[str, float]:
        """The bounds given, by their names in `metrics.summary.Slo`."""
        given = {field.name.removeprefix("slo_") + "_s": getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in given.items() if value is not None}
