"""``pagedserve demo``: everything once, on this machine, in a few minutes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagedserve.cli.engine_options import EngineOptions, tell
from pagedserve.cli.errors import as_bad_input, refuse
from pagedserve.cli.option_kinds import switch
from pagedserve.cli.output_options import (
    ResultOptions,
    draw,
    out_folder,
    refuse_unless_empty,
    replacing,
)
from pagedserve.cli.replay_options import planned_line
from pagedserve.cli.screen import Screen
from pagedserve.cli.trace_options import prompts_seed
from pagedserve.cli.validate import ProgressBars, measured, percent
from pagedserve.policy import policy

if TYPE_CHECKING:
    from pagedserve.engine.engine import Engine
    from pagedserve.metrics.profile import Profile
    from pagedserve.metrics.record import RunRecord
    from pagedserve.validation.validate import Validation

HELP = """Serve a slice of traffic under three policies, live and simulated, and show both side by side.

Fetches SmolLM2-135M once (93 MB), measures this device briefly, then replays an Azure-shaped trace under
serial, static and mixed (continuous) batching. About two minutes on two CPU cores. Nothing else should run.

\b
Examples:
  pagedserve demo
  pagedserve demo --tiny      # seconds, nothing is fetched: a random model
"""
MODEL = "smollm2-135m"
POLICIES = ("serial", "static", "mixed")
REFERENCE = "mixed"
SAMPLE = "azure_shaped_500"
NUM_REQUESTS, NUM_TINY_REQUESTS = 40, 12
LOAD = 0.8
RUN_S, TINY_RUN_S = 15.0, 1.0
MAX_NUM_SEQS, MAX_BATCHED = 16, 256
REPEATS = 6
NUM_BLOCKS = 320  # little more than the traffic needs, so that occupancy can be seen
OUT = Path("runs")
HEADINGS = (
    "output\ntokens/s",
    "TTFT p50\n(s)",
    "TTFT p90\n(s)",
    "ITL p50\n(ms)",
    "ITL p90\n(ms)",
    "latency\np50 (s)",
    "KV occu-\npancy (%)",
    "KV waste\n(%)",
    "peak\nrunning",
)


def demo(
    results: ResultOptions,
    tiny: Annotated[
        bool, switch("--tiny", "A random model of two layers: no download, a few seconds.", None)
    ] = False,
    model: Annotated[
        str | None,
        Option(metavar="MODEL", help=f"Another model than {MODEL}; see 'pagedserve generate --help'."),
    ] = None,
    out: Annotated[
        Path | None, out_folder("Where records and pictures go; the default is a new folder under runs/.")
    ] = None,
    seed: Annotated[int, prompts_seed(None)] = 0,
) -> None:
    """The command; see ``HELP``."""
    if tiny and model is not None:
        refuse(f"--tiny and --model {model} both choose the model; give one of them")
    results.check(writes_more=True)
    folder = out or OUT / datetime.now().strftime("demo-%Y%m%d-%H%M%S")
    with as_bad_input():
        refuse_unless_empty(folder, results.overwrite)
    screen, began = Screen(results.is_quiet), time.perf_counter()
    engine, name, lines = _engine(tiny, model, results.is_quiet)
    screen.lines(lines)
    try:
        profile = measured(engine, name, "small", screen, REPEATS)
        found = _validated(engine, profile, seed, tiny, screen)
    finally:
        engine.close()
    _show(found, screen)
    with as_bad_input():
        saved = _save(found, profile, folder, results.overwrite)
    screen.lines([*saved, f"took {time.perf_counter() - began:,.0f} s; next: pagedserve validate --help"])
    results.write({label: each.as_dict() for label, each in found.items()} | {"out": str(folder)})


def _engine(tiny: bool, model: str | None, is_quiet: bool) -> tuple[Engine, str, list[str]]:
    """An idle engine, its model's name, and what to say of it."""
    if tiny:
        import torch

        from pagedserve.engine.engine import Engine
        from pagedserve.engine.tiny import MAX_MODEL_LEN, NAME, tiny_model
        from pagedserve.policy import Limits

        torch.set_num_threads(1)  # matrices this small lose more to the threads' barriers than they gain
        limits = Limits(MAX_BATCHED, MAX_NUM_SEQS, MAX_MODEL_LEN, num_blocks=MAX_MODEL_LEN)
        return Engine(*tiny_model(), policy(REFERENCE), limits), NAME, [f"model: {NAME}, float32, cpu"]
    options = EngineOptions(
        model or MODEL,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_BATCHED,
        max_model_len=2048,
        num_blocks=NUM_BLOCKS,
    )
    tell([f"loading {options.model}"], is_quiet)
    with as_bad_input():
        llm = options.start(is_quiet=is_quiet)
    return llm.engine, options.model, [f"model: {options.model}", *llm.decisions]


def _validated(
    engine: Engine, profile: Profile, seed: int, tiny: bool, screen: Screen
) -> dict[str, Validation]:
    """Every policy on the same traffic."""
    from pagedserve.traces.sample_files import sample
    from pagedserve.traces.transforms import first
    from pagedserve.validation.planning import Setting
    from pagedserve.validation.policies import shared_traffic, validated
    from pagedserve.validation.validate import LiveBench

    policies = {label: policy(label) for label in POLICIES}
    trace = first(sample(SAMPLE), NUM_TINY_REQUESTS if tiny else NUM_REQUESTS)
    setting = Setting(policies[REFERENCE], engine.limits)
    run_s = TINY_RUN_S if tiny else RUN_S
    with as_bad_input():
        traffic = shared_traffic(trace, policies, REFERENCE, setting, profile, load=LOAD, run_s=run_s)
    screen.lines([planned_line(traffic)])
    with ProgressBars(screen) as progress:
        return dict(
            validated(LiveBench(engine), policies, traffic, setting, profile, seed=seed, progress=progress)
        )


def _show(found: Mapping[str, Validation], screen: Screen) -> None:
    """One table, three lines a policy, and the decisions."""
    screen.grid(("", "", *HEADINGS), _rows(found))
    steps = sum(each.decisions.steps_live for each in found.values())
    same = sum(each.decisions.steps_identical for each in found.values())
    screen.lines([f"decisions: {same:,} of {steps:,} live steps identical when replayed by the simulator"])


def _rows(found: Mapping[str, Validation]) -> Iterator[tuple[str, ...]]:
    from pagedserve.metrics.compare import POLICY_COLUMNS

    for number, (label, each) in enumerate(found.items()):
        if number:
            yield ("",) * (2 + len(HEADINGS))
        for name, kind in ((label, "live"), ("", "simulated")):
            texts = (shown.text(each.table.at[shown.metric, kind]) for shown in POLICY_COLUMNS)
            yield (name, kind, *texts)
        errors = (float(each.table.at[shown.metric, "error_pct"]) for shown in POLICY_COLUMNS)
        yield ("", "error", *("–" if math.isnan(error) else percent(error, signed=True) for error in errors))


def _save(found: Mapping[str, Validation], profile: Profile, folder: Path, overwrite: bool) -> list[str]:
    """Records, profile, and the pictures of the live runs and of the predictions."""
    from pagedserve.validation import plots

    live: dict[str, RunRecord] = {label: each.live[0] for label, each in found.items()}
    for label, each in found.items():
        each.live[0].save(folder / label / "live", overwrite=overwrite)
        each.simulated.save(folder / label / "simulated", overwrite=overwrite)
    profile.save(folder / "profile.json")
    pictures = draw(live, folder)
    figure = plots.policies_foretold({label: (each.live[0], each.simulated) for label, each in found.items()})
    with replacing(folder / "foretold.png") as fresh:
        figure.savefig(fresh)
    names = ", ".join(file.name for file in [*pictures, folder / "foretold.png"])
    return [f"saved in {folder}: records, profile.json, {names}"]
