"""``pagedserve simulate``: serve a trace with one policy or several, on a clock instead of a device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pagedserve.cli.device_options import DeviceOptions, Setup
from pagedserve.cli.errors import as_bad_input, refuse
from pagedserve.cli.option_kinds import switch
from pagedserve.cli.output_options import (
    PANEL,
    PICTURES,
    ResultOptions,
    draw,
    out_folder,
    refuse_unless_drawable,
    refuse_unless_empty,
)
from pagedserve.cli.policy_options import PolicyOptions, described
from pagedserve.cli.run_options import LimitOptions, RunOptions, SloOptions
from pagedserve.cli.screen import Screen, endings, refusals
from pagedserve.cli.synthetic_options import SyntheticOptions
from pagedserve.cli.trace_options import TraceOptions, trace_source
from pagedserve.policy import Limits, Policy, Scheduler

if TYPE_CHECKING:
    from pagedserve.metrics.record import RunRecord
    from pagedserve.metrics.summary import Summary
    from pagedserve.simulator.cost import CostModel
    from pagedserve.traces.trace import Trace

HELP = """Serve a trace with one policy or several and compare what each does to latency and memory.

\b
Examples:
  # What would vLLM's policy do with this traffic on an H200?
  pagedserve simulate --trace sample:azure_shaped_500
\b
  # Two batching rules under eight times the load, with pictures
  pagedserve simulate --trace sample:azure_shaped_500 --rate 44 --out runs --plots \\
      --policy mixed --policy prefill_first
\b
  # What paging saves: two allocators in a pool of 4,096 blocks
  pagedserve simulate --trace conv.csv --first 2000 --num-blocks 4096 \\
      --policy mixed --policy mixed,allocator=contiguous_max
\b
  # A synthetic trace on another device, results to a program
  pagedserve simulate --trace synthetic --num-prompts 500 --rate 8 --input-len 512 \\
      --output-len lognormal:median=128,sigma=1 --device l40s --json - | jq .runs
"""


@dataclass(frozen=True, slots=True)
class SavingOptions:
    """Where the records go."""

    out: Annotated[
        Path | None, out_folder("Save each run's record in DIR, in a folder named as its policy.")
    ] = None
    keep_plans: Annotated[bool, switch("--keep-plans", "Keep every step's plan in the record.", PANEL)] = (
        False
    )

    plots: Annotated[bool, switch("--plots", f"Draw {', '.join(PICTURES)} into DIR.", PANEL)] = False

    def folders(self, labels: list[str], overwrite: bool) -> dict[str, Path]:
        """Label to the folder of its record, each checked; none if nothing is to be saved."""
        if self.out is None:
            if self.keep_plans or self.plots:
                option = "--keep-plans" if self.keep_plans else "--plots"
                refuse(f"{option}: no folder to write into; give --out DIR as well")
            return {}
        if self.plots:
            refuse_unless_drawable(self.out, overwrite)
        folders = {label: self.out / label for label in labels}
        for folder in folders.values():
            refuse_unless_empty(folder, overwrite, "the record")
            if folder.is_dir() and any(folder.iterdir()) and not (folder / "header.json").is_file():
                refuse(f"{folder}: holds no record that could be replaced; choose another --out")
        return folders


def simulate(
    source: Annotated[str, trace_source()],
    trace_options: TraceOptions,
    synthetic: SyntheticOptions,
    policy_options: PolicyOptions,
    device_options: DeviceOptions,
    limit_options: LimitOptions,
    run: RunOptions,
    slo: SloOptions,
    saving: SavingOptions,
    results: ResultOptions,
) -> None:
    """The command; see ``HELP``."""
    results.check(writes_more=saving.out is not None)
    with as_bad_input():
        policies = policy_options.chosen()
        limit_options.limits(num_blocks=1)
        setup = device_options.decide(limit_options.block_size)
        limits = limit_options.limits(setup.num_blocks)
        folders = saving.folders(list(policies), results.overwrite)
        trace = trace_options.load(source, synthetic)
        _check(list(policies.values()), limits, trace, run, setup.cost)
    screen = Screen(results.is_quiet)
    screen.lines([*trace.report.lines(), traffic_line(trace), *setup.lines, _limits(limits, run)])
    screen.lines(f"{label}: {described(chosen)}" for label, chosen in policies.items())
    if trace.blocks is None and any(chosen.enable_prefix_caching for chosen in policies.values()):
        screen.lines(["prefix caching: the trace does not say which prompts share blocks"])
    records: dict[str, RunRecord] = {}
    for label, record in _runs(policies, trace, setup, limits, run, saving.keep_plans, screen):
        records[label] = record
        if label in folders:
            with as_bad_input():
                record.save(folders[label], overwrite=results.overwrite)
            screen.lines([f"  saved in {folders[label]}"])
    summaries = _summaries(records, slo)
    for label, record in records.items():
        screen.lines(endings(label, record, summaries[label]))
    screen.table(summaries)
    if saving.out is not None and saving.plots:
        screen.lines(f"drawn: {file}" for file in draw(records, saving.out))
    results.write(_results(trace, setup, limits, records, summaries, folders))


def _check(
    policies: Sequence[Policy], limits: Limits, trace: Trace, run: RunOptions, cost: CostModel
) -> None:
    """Raise ValueError for what `simulate` would refuse, before anything is printed."""
    from pagedserve.simulator.constant import ConstantCost
    from pagedserve.simulator.cost import check_priced
    from pagedserve.traces.requests import to_requests

    if limits.num_cpu_blocks and not any(policy.can_swap for policy in policies):
        raise ValueError(
            f"num_cpu_blocks is {limits.num_cpu_blocks} and no policy swaps: leave it out, or swap"
        )
    if isinstance(cost, ConstantCost) and cost.per_swapped_block_ns and not limits.num_cpu_blocks:
        raise ValueError("--swap-block-us is given and nothing is swapped: leave it out, or swap")
    for policy in policies:
        check_priced(cost, policy, limits)
        Scheduler(policy, limits, run.overlap_depth)
        to_requests(trace, limits.block_size if policy.enable_prefix_caching else None, run.max_tokens)


def _runs(
    policies: Mapping[str, Policy],
    trace: Trace,
    setup: Setup,
    limits: Limits,
    run: RunOptions,
    keep_plans: bool,
    screen: Screen,
) -> Iterator[tuple[str, RunRecord]]:
    """One run after another, each with a progress bar and a line that says how long it took."""
    from pagedserve.simulator.simulate import simulate as run_simulation

    for label, chosen in policies.items():
        began = time.perf_counter()
        with screen.progress(label) as progress:
            record = run_simulation(
                trace,
                chosen,
                setup.cost,
                limits,
                overlap_depth=run.overlap_depth,
                max_tokens=run.max_tokens,
                client_timeout_s=run.client_timeout,
                max_in_flight=run.max_in_flight,
                keep_plans=keep_plans,
                check=run.check,
                progress=progress,
            )
        took_s = time.perf_counter() - began
        outside = record.header["counters"].get("num_extrapolated", 0)
        beyond = f", {outside:,} of them outside what was measured" if outside else ""
        screen.lines([f"{label}: {record.steps.num_rows:,} steps simulated in {took_s:.1f} s{beyond}"])
        yield label, record


def _summaries(records: Mapping[str, RunRecord], slo: SloOptions) -> dict[str, Summary]:
    from pagedserve.metrics.summary import Slo, summarize

    bounds = slo.bounds()
    goal = Slo(**bounds) if bounds else None
    return {label: summarize(record, goal) for label, record in records.items()}


def traffic_line(trace: Trace) -> str:
    """How many requests, how dense, how long."""
    found = trace.describe()
    rate = (
        "at one instant"
        if found.rate_per_s is None
        else f"at {found.rate_per_s:.4g}/s over {found.span_s:,.1f} s"
    )
    assert found.prompt is not None
    assert found.output is not None
    return (
        f"traffic: {len(trace):,} requests {rate}; prompts mean {found.prompt.mean:,.0f}, outputs mean "
        f"{found.output.mean:,.0f} tokens"
    )


def _limits(limits: Limits, run: RunOptions) -> str:
    shown = [
        f"{name} {getattr(limits, name):,}"
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    ]
    if limits.num_cpu_blocks:
        shown.append(f"num_cpu_blocks {limits.num_cpu_blocks:,}")
    if limits.max_num_queued_reqs is not None:
        shown.append(f"max_num_queued_reqs {limits.max_num_queued_reqs:,}")
    return f"limits: {', '.join(shown)}; overlap depth {run.overlap_depth}"


def _results(
    trace: Trace,
    setup: Setup,
    limits: Limits,
    records: Mapping[str, RunRecord],
    summaries: Mapping[str, Summary],
    folders: Mapping[str, Path],
) -> dict[str, Any]:
    """All that the screen shows and more, as JSON values; equal inputs give equal results."""
    return {
        "trace": {
            "name": trace.name,
            "sha256": trace.sha256(),
            "report": trace.report.as_dict(),
            "summary": trace.describe().as_dict(),
        },
        "limits": asdict(limits),
        "pool": setup.pool,
        "runs": {
            label: {
                "metrics": summaries[label].as_dict(),
                "refusals": refusals(record),
                "header": record.header,
                "record": str(folders[label]) if label in folders else None,
            }
            for label, record in records.items()
        },
    }
