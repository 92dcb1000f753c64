"""Synthetic traces from the command line: arrivals, and lengths written as short texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagedserve.cli.errors import refuse
from pagedserve.cli.flags import given
from pagedserve.cli.option_kinds import count, switch
from pagedserve.cli.values import real

if TYPE_CHECKING:
    from pagedserve.traces.lengths import LengthDist, TraceLengths
    from pagedserve.traces.trace import Trace

PANEL = "Synthetic trace (with --rate)"
LENGTHS = "N, uniform:LOW:HIGH or lognormal:median=M,sigma=S (also mean=, cv=, min=, max=)"


@dataclass(frozen=True, slots=True)
class SyntheticOptions:
    """Options that only a synthetic trace has; None: not given."""

    num_prompts: Annotated[int | None, count("Requests to make.", PANEL)] = None
    input_len: Annotated[
        str | None, Option(metavar="DIST", help=f"Prompt lengths: {LENGTHS}.", rich_help_panel=PANEL)
    ] = None
    output_len: Annotated[
        str | None, Option(metavar="DIST", help="Output lengths, written alike.", rich_help_panel=PANEL)
    ] = None
    lengths_from: Annotated[
        str | None,
        Option(
            metavar="TRACE",
            help="Instead of both: draw pairs of lengths from a trace file or sample:NAME.",
            rich_help_panel=PANEL,
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        Option(
            parser=real(0, above=True, infinite=True),
            metavar="B",
            help="Shape of the gamma gaps between arrivals: 1 Poisson (the default), below 1 burstier.",
            rich_help_panel=PANEL,
        ),
    ] = None
    rescale_arrivals: Annotated[
        bool | None,
        switch("--rescale-arrivals", "Stretch the arrivals so that the mean rate is exact.", PANEL),
    ] = None
    shared_prefix: Annotated[
        str | None,
        Option(
            metavar="GROUPS:TOKENS",
            help="Start each prompt with one of GROUPS shared prefixes of TOKENS tokens.",
            rich_help_panel=PANEL,
        ),
    ] = None
    seed: Annotated[int | None, count("Seed of the random numbers; default 0.", PANEL, low=0)] = None

    def refuse_any(self, source: str) -> None:
        """Refuse options of a synthetic trace where ``source`` is another one."""
        if found := given(self):
            refuse(f"{', '.join(found)}: only a synthetic trace has this, but the trace is {source}")

    def make(self, rate: float | None) -> Trace:
        """The trace; ``rate`` in requests/s. Raises ValueError for numbers that make none."""
        from pagedserve.traces.synthesis import SharedPrefixes, synthesize

        if rate is None or self.num_prompts is None:
            refuse("a synthetic trace needs --num-prompts and --rate (requests/s, or inf for all at once)")
        prompt, output, lengths = self._lengths()
        prefixes = None
        if self.shared_prefix is not None:
            groups, _, tokens = self.shared_prefix.partition(":")
            if not (groups.isdecimal() and tokens.isdecimal()):
                refuse(f"--shared-prefix is {self.shared_prefix!r}; write GROUPS:TOKENS, such as 8:512")
            prefixes = SharedPrefixes(int(groups), int(tokens))
        return synthesize(
            self.num_prompts,
            rate,
            burstiness=1.0 if self.burstiness is None else self.burstiness,
            prompt=prompt,
            output=output,
            lengths=lengths,
            seed=self.seed or 0,
            rescale=bool(self.rescale_arrivals),
            prefixes=prefixes,
        )

    def _lengths(self) -> tuple[LengthDist | None, LengthDist | None, TraceLengths | None]:
        if self.lengths_from is None:
            if self.input_len is None or self.output_len is None:
                refuse("a synthetic trace needs --input-len and --output-len, or --lengths-from TRACE")
            return (
                parsed_lengths("--input-len", self.input_len),
                parsed_lengths("--output-len", self.output_len),
                None,
            )
        if self.input_len is not None or self.output_len is not None:
            refuse("--lengths-from gives both lengths; leave out --input-len and --output-len")
        from pagedserve.traces.lengths import TraceLengths
        from pagedserve.traces.sample_files import named_trace

        return None, None, TraceLengths(named_trace(self.lengths_from))


def parsed_lengths(option: str, text: str) -> LengthDist:
    """A length distribution as ``LENGTHS`` writes it."""
    from pagedserve.traces.lengths import Fixed, LogNormal, Uniform

    kind, _, rest = text.partition(":")
    try:
        if kind == "uniform":
            low, high = rest.split(":")
            return Uniform(int(low), int(high))
        if kind == "lognormal":
            given = dict(item.split("=") for item in rest.split(","))
            bounds = {name + "imum": int(given.pop(name)) for name in ("min", "max") if name in given}
            shape = {name: float(value) for name, value in given.items()}
            if not set(shape) <= {"median", "mean", "sigma", "cv"}:
                raise ValueError(f"unknown: {', '.join(shape)}")
            return LogNormal(**shape, **bounds)  # pyright: ignore[reportArgumentType]
        return Fixed(int(text))
    except ValueError as error:
        refuse(f"{option} is {text!r}; write {LENGTHS} ({error})")
