"""``pagedserve validate``: one trace simulated and live, and how far apart the two are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from pagedserve.cli.engine_options import EngineOptions, EnginePolicyOptions, tell
from pagedserve.cli.errors import as_bad_input, refuse
from pagedserve.cli.option_kinds import choice, count
from pagedserve.cli.output_options import (
    ResultOptions,
    out_folder,
    refuse_unless_empty,
    replacing,
)
from pagedserve.cli.policy_options import described
from pagedserve.cli.profile import GRID_NAMES
from pagedserve.cli.replay_options import TrafficOptions, planned_line
from pagedserve.cli.screen import Screen

if TYPE_CHECKING:
    from pagedserve.engine.engine import Engine
    from pagedserve.metrics.profile import Profile
    from pagedserve.policy import Policy
    from pagedserve.traces.trace import Trace
    from pagedserve.validation.validate import Validation

HELP = """Predict a run, then run it: every metric live beside simulated, and every decision checked.

The device is measured first (or --profile read) and never fitted to the run that follows.

Lengths and rate of the trace are scaled to this device; both are said. Nothing else should run meanwhile.

\b
Examples:
  pagedserve validate --model smollm2-135m --requests 100
  pagedserve validate --model smollm2-135m --trace conv.csv --requests 100 --load 0.85 \\
      --policy mixed --profile smollm2.json --repeats 5 --out runs/validation
"""
MEASURING_PANEL = "Measurement"
PICTURES = {
    "predicted.png": "predicted_against_live",
    "distributions.png": "distributions",
    "timelines.png": "timelines",
}


@dataclass(frozen=True, slots=True)
class MeasuringOptions:
    """What the simulation predicts with, and how often the live run is repeated."""

    profile: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="A profile of this model on this device; without it the device is measured first.",
            rich_help_panel=MEASURING_PANEL,
        ),
    ] = None
    grid: Annotated[
        str | None,
        choice(
            "How many shapes are measured without --profile; the default is standard.",
            MEASURING_PANEL,
            *GRID_NAMES,
        ),
    ] = None
    repeats: Annotated[
        int, count("Live runs; medians are compared, and their spread is shown.", MEASURING_PANEL)
    ] = 1

    def __post_init__(self) -> None:
        if self.profile is not None and self.grid is not None:
            refuse(f"--grid {self.grid}: nothing is measured with --profile; give one of them")

    def load(self) -> Profile | None:
        """The profile that was given. ValueError says what is wrong with it."""
        from pagedserve.metrics.profile import Profile

        return None if self.profile is None else Profile.load(self.profile)


@dataclass(frozen=True, slots=True)
class OutOption:
    """Where records, profile and pictures go."""

    out: Annotated[
        Path | None,
        out_folder(f"Save the records, the profile, {', '.join(PICTURES)} and validation.json in DIR."),
    ] = None

    def check(self, overwrite: bool) -> None:
        """Refuse a folder that cannot be made or holds something."""
        if self.out is not None:
            refuse_unless_empty(self.out, overwrite)


def validate(
    engine_options: EngineOptions,
    traffic_options: TrafficOptions,
    policy_options: EnginePolicyOptions,
    measuring: MeasuringOptions,
    saving: OutOption,
    results: ResultOptions,
) -> None:
    """The command; see ``HELP``."""
    results.check(writes_more=saving.out is not None)
    with as_bad_input():
        engine_options.check()
        label, spec = policy_options.chosen()
        saving.check(results.overwrite)
        profile = measuring.load()
        trace = traffic_options.read()
    screen = Screen(results.is_quiet)
    with as_bad_input():
        tell([f"loading {engine_options.model}"], results.is_quiet)
        llm = engine_options.start(
            spec, policy_options.overlap_depth, host=policy_options.host, is_quiet=results.is_quiet
        )
    try:
        screen.lines([*llm.decisions, f"policy {label}: {described(spec)}", *trace.report.lines()])
        if profile is None:
            profile = _measured_here(
                llm.engine, engine_options.model, measuring.grid or GRID_NAMES[0], screen
            )
        found = _validated(llm.engine, spec, trace, profile, traffic_options, measuring.repeats, screen)
    finally:
        llm.close()
    show(found, screen)
    if saving.out is not None:
        with as_bad_input():
            screen.lines(save(found, profile, saving.out, results.overwrite))
    results.write({**found.as_dict(), "out": None if saving.out is None else str(saving.out)})


def _measured_here(engine: Engine, model_name: str, grid: str, screen: Screen) -> Profile:
    """As `measured`; refuses limits that no point of the grid fits."""
    from pagedserve.engine.profile_grid import GRIDS

    with as_bad_input():
        GRIDS[grid].fitting(engine.limits)
        return measured(engine, model_name, grid, screen)


def _validated(
    engine: Engine,
    spec: Policy,
    trace: Trace,
    profile: Profile,
    asked: TrafficOptions,
    repeats: int,
    screen: Screen,
) -> Validation:
    """Plan the traffic with the profile, then simulate it and run it live."""
    from pagedserve.simulator.cost import check_priced
    from pagedserve.simulator.measured import MeasuredCost
    from pagedserve.validation.planning import Setting
    from pagedserve.validation.profiles import check_profile
    from pagedserve.validation.validate import LiveBench, validate

    with as_bad_input():
        check_profile(profile, engine)
        cost = MeasuredCost(profile)
        check_priced(cost, spec, engine.limits)
        setting = Setting(spec, engine.limits, engine.scheduler.overlap_depth, asked.max_tokens)
        traffic = asked.planned(trace, setting, cost)
    screen.lines([planned_line(traffic)])
    bench = LiveBench(engine)
    with ProgressBars(screen) as progress:
        return validate(bench, traffic, setting, profile, repeats=repeats, seed=asked.seed, progress=progress)


def measured(engine: Engine, model_name: str, grid: str, screen: Screen, repeats: int = 5) -> Profile:
    """A profile of an idle engine, with a bar."""
    from pagedserve.engine.profile_grid import GRIDS
    from pagedserve.engine.profiler import profile_engine

    with screen.progress("measuring the device") as progress:
        found = profile_engine(engine, model_name, GRIDS[grid], num_repeats=repeats, progress=progress)
    screen.lines(
        [f"device measured: {len(found.steps)} steps, {repeats} times each (sha256 {found.sha256()[:12]}…)"]
    )
    return found


class ProgressBars(ExitStack):
    """One progress bar after another: each call closes the one before."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def __call__(self, label: str) -> Callable[[int, int], None] | None:
        self.close()
        return self.enter_context(self._screen.progress(label))


def show(found: Validation, screen: Screen) -> None:
    """The table, the decisions, and what to know to trust them."""
    from pagedserve.metrics.compare import POLICY_COLUMNS

    def value(metric: str, column: str) -> float:
        return float(found.table.at[metric, column])  # pyright: ignore[reportArgumentType]

    rows = [
        (
            shown.heading,
            shown.text(value(shown.metric, "live")),
            shown.text(value(shown.metric, "simulated")),
            percent(value(shown.metric, "error_pct"), signed=True),
            percent(value(shown.metric, "live_repeat_spread_pct")),
        )
        for shown in POLICY_COLUMNS
    ]
    screen.grid(("", "live", "simulated", "error", "live spread"), rows)
    screen.lines(_remarks(found))


def _remarks(found: Validation) -> Iterator[str]:
    decisions, settings = found.decisions, found.settings
    same = f"decisions: {decisions.steps_identical:,} of {decisions.steps_live:,} live steps identical"
    yield same + ("" if decisions.identical else f"; {decisions.first_difference}")
    yield f"requests were sent at most {max(settings['send_lag_max_s']) * 1e3:,.1f} ms late"
    outside = settings["num_steps_extrapolated"]
    if outside:
        share = outside / found.simulated.steps.num_rows
        yield f"{outside:,} simulated steps ({share:.0%}) lie outside what was measured; see 'pagedserve profile'"


def percent(value: float, *, signed: bool = False) -> str:
    """A percentage; "–" where there is none."""
    return "–" if math.isnan(value) else f"{value:+.1f} %" if signed else f"{value:.1f} %"


def save(found: Validation, profile: Profile, folder: Path, overwrite: bool) -> Iterable[str]:
    """Write everything into ``folder``; yields a line for each thing written."""
    import json
    import shutil

    from pagedserve.validation import plots

    folder.mkdir(parents=True, exist_ok=True)
    found.simulated.save(folder / "simulated", overwrite=overwrite)
    for old in folder.glob("live_*"):
        if (old / "header.json").is_file():
            shutil.rmtree(old)  # of more repeats, perhaps, of another run
    for number, record in enumerate(found.live, 1):
        record.save(folder / f"live_{number}", overwrite=overwrite)
    profile.save(folder / "profile.json")
    with replacing(folder / "validation.json") as fresh:
        fresh.write_text(json.dumps(found.as_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    arguments: dict[str, tuple[Any, ...]] = {
        "predicted_against_live": (found.live, found.simulated),
        "distributions": (found.live, found.simulated),
        "timelines": (found.live[0], found.simulated),
    }
    for name, function in PICTURES.items():
        figure = getattr(plots, function)(*arguments[function])
        with replacing(folder / name) as fresh:
            figure.savefig(fresh)
    return [f"saved in {folder}: records, profile.json, validation.json, {', '.join(PICTURES)}"]
