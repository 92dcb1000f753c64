"""Within which limits the policies decide, how the run goes, and what good latency is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from typer import Option

from pagedserve.cli.values import real, whole
from pagedserve.policy import Limits

LIMITS_PANEL, RUN_PANEL, SLO_PANEL = "Limits", "Run", "Service level objective"
DEFAULTS = Limits()
SECONDS = real(0, above=True)
MaxNumSeqs = Annotated[
    int,
    Option(parser=whole(1), metavar="N", help="Requests running at once.", rich_help_panel=LIMITS_PANEL),
]
MaxNumBatchedTokens = Annotated[
    int,
    Option(parser=whole(1), metavar="N", help="Tokens computed in one step.", rich_help_panel=LIMITS_PANEL),
]
BlockSize = Annotated[
    int, Option(parser=whole(1), metavar="N", help="Tokens in a KV block.", rich_help_panel=LIMITS_PANEL)
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


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """The limits of a scheduler but the pool, under vLLM's names."""

    max_num_seqs: MaxNumSeqs = DEFAULTS.max_num_seqs
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens
    max_model_len: Annotated[
        int,
        Option(
            parser=whole(2),
            metavar="N",
            help="Prompt plus output of one request.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = DEFAULTS.max_model_len
    block_size: BlockSize = DEFAULTS.block_size
    max_num_queued_reqs: Annotated[
        int | None,
        Option(
            parser=whole(1),
            metavar="N",
            help="Requests that may wait; more are refused.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None

    def limits(self, num_blocks: int) -> Limits:
        """The limits with that pool. ValueError says which number is wrong."""
        return Limits(num_blocks=num_blocks, **{f.name: getattr(self, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How clients and replica behave."""

    overlap_depth: OverlapDepth = 0
    max_tokens: Annotated[
        int | None,
        Option(
            parser=whole(1),
            metavar="N",
            help="Output limit that every request declares; the default is the trace's longest output.",
            rich_help_panel=RUN_PANEL,
        ),
    ] = None
    client_timeout: Annotated[
        float | None,
        Option(
            parser=SECONDS,
            metavar="S",
            help="A client gives up on a request that has not ended S seconds after it was sent.",
            rich_help_panel=RUN_PANEL,
        ),
    ] = None
    max_in_flight: Annotated[
        int | None,
        Option(
            "--max-in-flight",
            "--max-concurrency",
            parser=whole(1),
            metavar="N",
            help="Closed loop: a request is sent when it is due and fewer than N are in flight.",
            rich_help_panel=RUN_PANEL,
        ),
    ] = None
    check: Annotated[
        bool,
        Option(
            "--check",
            help="Recompute every invariant of scheduler and KV pool after every call; slow.",
            rich_help_panel=RUN_PANEL,
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class SloOptions:
    """Bounds that a good request keeps, in seconds; they add attainment and goodput to the table."""

    slo_ttft: Annotated[
        float | None,
        Option(parser=SECONDS, metavar="S", help="Time to first token.", rich_help_panel=SLO_PANEL),
    ] = None
    slo_tpot: Annotated[
        float | None,
        Option(parser=SECONDS, metavar="S", help="Time per output token.", rich_help_panel=SLO_PANEL),
    ] = None
    slo_e2e: Annotated[
        float | None,
        Option(parser=SECONDS, metavar="S", help="End-to-end latency.", rich_help_panel=SLO_PANEL),
    ] = None

    def bounds(self) -> dict[str, float]:
        """The bounds given, by their names in `metrics.summary.Slo`."""
        given = {field.name.removeprefix("slo_") + "_s": getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in given.items() if value is not None}
