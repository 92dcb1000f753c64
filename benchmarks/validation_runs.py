"""The acceptance of the simulator: predictions at several loads against live repeats, interleaved.

The device is profiled once, before any live run; every load is then simulated, and the live repeats of all loads
follow one another in turns, so that the machine's slow minutes fall on all of them. Nothing else should run.

    python benchmarks/validation_runs.py --trace conv.csv --out runs/acceptance
"""

import argparse
import json
import math
from pathlib import Path

from rich.console import Console
from rich.progress import track

from pagedserve.engine.heap import settle_heap
from pagedserve.engine.llm import LLM
from pagedserve.engine.profile_grid import GRIDS
from pagedserve.engine.profiler import profile_engine
from pagedserve.metrics.profile import Profile
from pagedserve.metrics.record import RunRecord
from pagedserve.policy import policy
from pagedserve.simulator.measured import MeasuredCost
from pagedserve.traces.sample_files import named_trace
from pagedserve.traces.transforms import first
from pagedserve.validation import plots
from pagedserve.validation.planning import Setting, Traffic, plan_traffic
from pagedserve.validation.validate import LiveBench, validation_of

BOUNDS_PCT = {"output_tokens_per_s": 5.0, "itl_p50_s": 5.0, "e2e_p50_s": 7.0, "ttft_p50_s": 10.0}
"""Largest error, or one and a half times the spread of the live repeats where that is larger."""


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--trace", default="sample:azure_shaped_500")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--policy", default="vllm_v1")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.85, math.inf])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="measured before; else it is measured first")
    parser.add_argument("--profile-repeats", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Predictions, live runs in turns, and how far they are apart."""
    options = parsed()
    llm = LLM(options.model, policy=options.policy)
    settle_heap()
    options.out.mkdir(parents=True, exist_ok=True)
    profile = Profile.load(options.profile) if options.profile else measured(llm, options)
    profile.save(options.out / "profile.json")
    trace = named_trace(options.trace)
    setting = Setting(policy(options.policy), llm.engine.limits)
    cost = MeasuredCost(profile)
    fitted = plan_traffic(first(trace, options.requests), setting, cost, load=0.7, fit=True)
    traffic = {
        load: plan_traffic(
            first(trace, options.requests), setting, cost, length_scale=fitted.length_scale, **rate_of(load)
        )
        for load in options.loads
    }
    simulated = {load: setting.simulated(own.trace, cost) for load, own in traffic.items()}
    bench = LiveBench(llm.engine)
    bench.warm_up()
    live: dict[float, list[RunRecord]] = {load: [] for load in options.loads}
    order = [(number, load) for number in range(options.repeats) for load in options.loads]
    for number, load in track(order, "live runs", console=Console(stderr=True)):
        record = bench.replay(traffic[load].trace, setting)
        record.save(options.out / f"live_{load:g}_{number + 1}", overwrite=True)
        live[load].append(record)
    llm.close()
    save(setting, profile, traffic, simulated, live, options.out)


def save(
    setting: Setting,
    profile: Profile,
    traffic: dict[float, Traffic],
    simulated: dict[float, RunRecord],
    live: dict[float, list[RunRecord]],
    out: Path,
) -> None:
    """Tell and draw how far live and simulated are apart, load by load."""
    told = {}
    for load, own in traffic.items():
        found = validation_of(own, setting, profile, simulated[load], live[load])
        told[f"{load:g}"] = found.as_dict()
        report(load, own, found)
        plots.predicted_against_live(live[load], simulated[load]).savefig(out / f"predicted_{load:g}.png")
        plots.timelines(live[load][0], simulated[load]).savefig(out / f"timelines_{load:g}.png")
    (out / "validation.json").write_text(json.dumps(told, indent=2), encoding="utf-8")


def rate_of(load: float) -> dict[str, float]:
    """An infinite load is everything at once."""
    return {"rate": math.inf} if math.isinf(load) else {"load": load}


def measured(llm: LLM, options: argparse.Namespace) -> Profile:
    """The standard grid, over as long a time as a few live runs: a shared machine has fast and slow minutes."""
    with Console(stderr=True).status("profiling"):
        repeats = options.profile_repeats
        return profile_engine(llm.engine, options.model, GRIDS["standard"], num_repeats=repeats)


def report(load: float, traffic: Traffic, found) -> None:
    """The table, and for each bounded metric whether it is kept."""
    print(
        f"\nload {load:g}: {len(traffic.trace)} requests at {traffic.rate:.3g}/s, lengths x {traffic.length_scale:g}"
    )
    print(found.table.round(4).to_string())
    print(f"decisions: {found.decisions.steps_identical} of {found.decisions.steps_live} identical")
    for name, bound in BOUNDS_PCT.items():
        error = abs(float(found.table.at[name, "error_pct"]))
        spread = float(found.table.at[name, "live_repeat_spread_pct"])
        allowed = bound if math.isnan(spread) else max(bound, 1.5 * spread)
        print(
            f"{name:20} |error| {error:5.1f} %  bound {allowed:5.1f} %  {'kept' if error <= allowed else 'MISSED'}"
        )


if __name__ == "__main__":
    main()
