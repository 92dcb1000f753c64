"""Writes a `RunRecord` while a run goes on; engine and simulator call it at the same points."""

from array import array
from collections.abc import Hashable, Iterable
from typing import Any

import pyarrow as pa

from pagedserve.metrics.plan_rows import plan_digest, swap_columns
from pagedserve.metrics.record import RunRecord
from pagedserve.metrics.record_tables import FORMAT_VERSION, SCHEMAS
from pagedserve.policy.plan import Finished, Outcome, StepPlan
from pagedserve.policy.request import Request, RequestState
from pagedserve.policy.scheduler import Scheduler


class Recorder:
    """Call each method right after the verb it is named for, with the same ``now_ns``.

    The cost of a step follows the plan's changes, not what runs. ``keep_plans`` keeps every plan and the
    requests' prefix keys (as small integers), which a replay of a live run needs.
    """

    def __init__(self, scheduler: Scheduler, keep_plans: bool = False) -> None:
        self._scheduler = scheduler
        self._keep_plans = keep_plans
        self._steps = _Columns("steps")
        self._requests = _Columns("requests")
        self._emissions = _Columns("emissions")
        self._calls = _Columns("calls")
        self._plans = _Columns("plans") if keep_plans else None
        self._live: dict[int, tuple[RequestState, int]] = {}
        self._prefix_keys: dict[int, list[int] | None] = {}
        # A run of decode tokens is a span of decode rounds [start, end); end is None while it goes on.
        self._runs: dict[int, list[tuple[int, int | None]]] = {}
        self._round_steps = array("q")
        self._num_committed_rounds = 0
        self._in_flight: dict[int, StepPlan] = {}
        self._key_numbers: dict[Hashable, int] = {}
        self._num_preemptions = self._num_discarded = 0

    @property
    def num_ended(self) -> int:
        """Requests that have ended in any way, refusals included."""
        return len(self._requests)

    def added(self, state: RequestState, due_ns: int, now_ns: int) -> None:
        """A request was accepted; ``due_ns`` is when it was planned to be sent."""
        self._calls.append(kind="add", subject=state.id, now_ns=now_ns)
        self._live[state.id] = (state, due_ns)
        self._note_keys(state.request)

    def refused(self, request: Request, due_ns: int, now_ns: int, error: str) -> None:
        """A request was refused at ``add``."""
        self._calls.append(kind="add", subject=request.id, now_ns=now_ns)
        if request.id in self._live:
            return  # a duplicate: the row is its namesake's
        self._note_keys(request)
        self._append_request(RequestState(request, 0, 0), due_ns, "refused", None, 0, error)
        self._prefix_keys.pop(request.id, None)

    def aborted(self, request: int, now_ns: int, reason: str = "abort") -> None:
        """``abort`` was called; ``reason`` tells a client's time-out from a wish to stop."""
        self._calls.append(kind="abort", subject=request, now_ns=now_ns)
        if request in self._live:
            self._ended(request, reason, now_ns)

    def scheduled(self, plan: StepPlan, now_ns: int) -> None:
        """``schedule`` was called and gave this plan, perhaps an empty one."""
        self._calls.append(kind="schedule", subject=plan.step, now_ns=now_ns)
        if plan.step is None:
            return
        self._in_flight[plan.step] = plan
        num_rounds = len(self._round_steps)
        for request in plan.left:
            if request in self._runs:
                start, _ = self._runs[request][-1]
                self._runs[request][-1] = (start, num_rounds)
        for request in plan.joined:
            if request in self._live:
                self._runs.setdefault(request, []).append((num_rounds, None))
        if plan.decodes:
            self._round_steps.append(plan.step)
        self._append_step(plan, now_ns)

    def launched(self, now_ns: int) -> None:
        """The newest scheduled step was handed to the device."""
        self._steps.columns["launch_ns"].append(now_ns)

    def committed(
        self, step: int, outcomes: Iterable[Outcome], finished: list[Finished], now_ns: int
    ) -> None:
        """``commit`` was called for ``step`` and ended ``finished``."""
        self._calls.append(kind="commit", subject=step, now_ns=now_ns)
        plan = self._in_flight.pop(step)
        discarded = self._scheduler.num_discarded_tokens
        self._steps.columns["commit_ns"].append(now_ns)
        self._steps.columns["num_discarded_tokens"].append(discarded - self._num_discarded)
        self._num_discarded = discarded
        if plan.decodes:
            self._num_committed_rounds += 1
        failed = {o.request for o in outcomes if o.stop_reason is not None and not o.num_tokens}
        for chunk in plan.chunks:
            if chunk.samples and chunk.request in self._live and chunk.request not in failed:
                self._emissions.append(request=chunk.request, first_step=step, num_steps=1)
        for request in failed.intersection(self._runs):
            last = self._num_committed_rounds - bool(plan.decodes)
            self._runs[request] = [
                (start, last if end is None else min(end, last)) for start, end in self._runs[request]
            ]
        if self._plans is not None:
            self._append_plan(self._plans, plan, outcomes)
        for end in finished:
            self._ended(end.request, end.reason, now_ns)

    def record(self, header: dict[str, Any]) -> RunRecord:
        """The record so far: open requests are kept as "unfinished", uncommitted steps are left out."""
        num_steps = len(self._steps.columns["commit_ns"])
        num_rows, num_runs = len(self._requests), len(self._emissions)
        for request, (state, due_ns) in self._live.items():
            num_tokens = state.num_output_tokens - self._num_uncommitted(state)
            self._append_emissions(request)
            self._append_request(state, due_ns, "unfinished", None, num_tokens, None)
        record = RunRecord(
            {"format_version": FORMAT_VERSION, **header},
            self._steps.table(num_steps),
            self._requests.table().sort_by("request"),
            self._emissions.table(),
            self._calls.table(),
            self._plans.table() if self._plans is not None else None,
        )
        # The run goes on: the open requests are written anew when they end.
        self._requests.cut(num_rows)
        self._emissions.cut(num_runs)
        return record

    def _ended(self, request: int, reason: str, now_ns: int) -> None:
        state, due_ns = self._live.pop(request)
        self._append_emissions(request)
        self._runs.pop(request, None)
        self._append_request(state, due_ns, reason, now_ns, state.num_output_tokens, None)
        self._prefix_keys.pop(request, None)

    def _append_emissions(self, request: int) -> None:
        """The request's runs of decode tokens, as far as their steps have committed."""
        for start, end in self._runs.get(request, ()):
            last = self._num_committed_rounds if end is None else min(end, self._num_committed_rounds)
            if last > start:
                first_step = self._round_steps[start]
                self._emissions.append(request=request, first_step=first_step, num_steps=last - start)

    def _num_uncommitted(self, state: RequestState) -> int:
        """Tokens of a live request that steps in flight are about to bring."""
        return sum(
            state.id in plan.decodes or any(c.request == state.id and c.samples for c in plan.chunks)
            for plan in self._in_flight.values()
        )

    def _append_request(
        self,
        state: RequestState,
        due_ns: int,
        reason: str,
        finish_ns: int | None,
        num_tokens: int,
        error: str | None,
    ) -> None:
        request = state.request
        self._requests.append(
            request=request.id,
            due_ns=due_ns,
            arrival_ns=request.arrival_ns,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            num_output_tokens=num_tokens,
            finish_reason=reason,
            first_schedule_ns=state.first_schedule_ns,
            finish_ns=finish_ns,
            num_preemptions=state.num_preemptions,
            num_prefix_hit_tokens=state.num_prefix_hit_tokens,
            num_recomputed_tokens=state.num_recomputed_tokens,
            priority=request.priority,
            tenant=request.tenant,
            deadline_ns=request.deadline_ns,
            predicted_output_tokens=request.predicted_output_tokens,
            error=error,
            prefix_keys=self._prefix_keys.get(request.id),
        )

    def _append_step(self, plan: StepPlan, now_ns: int) -> None:
        scheduler, columns = self._scheduler, self._steps.columns
        free, cached = scheduler.allocator.num_free_blocks, scheduler.allocator.num_cached_blocks
        columns["step"].append(plan.step)
        columns["schedule_ns"].append(now_ns)
        columns["num_prefill_tokens"].append(plan.shape.num_tokens - plan.shape.num_decodes)
        columns["num_decode_tokens"].append(plan.shape.num_decodes)
        columns["num_running"].append(len(scheduler.running))
        columns["num_waiting"].append(len(scheduler.waiting))
        columns["num_blocks_used"].append(scheduler.limits.num_blocks - free)
        columns["num_blocks_cached"].append(cached)
        columns["num_blocks_free"].append(free - cached)
        columns["num_wasted_slots"].append(scheduler.num_wasted_slots)
        columns["num_preemptions"].append(scheduler.num_preemptions - self._num_preemptions)
        columns["num_recomputed_tokens"].append(plan.num_recomputed_tokens)
        columns["num_prefix_hit_tokens"].append(plan.num_prefix_hit_tokens)
        columns["num_blocks_swapped_out"].append(plan.shape.num_blocks_swapped_out)
        columns["num_blocks_swapped_in"].append(plan.shape.num_blocks_swapped_in)
        columns["num_cpu_blocks_used"].append(scheduler.host.num_used_blocks)
        columns["plan_digest"].append(plan_digest(plan))
        self._num_preemptions = scheduler.num_preemptions

    def _append_plan(self, plans: "_Columns", plan: StepPlan, outcomes: Iterable[Outcome]) -> None:
        keys: dict[int, list[Hashable]] = {
            o.request: list(o.new_block_keys) for o in outcomes if o.new_block_keys
        }
        filled = [(r, i, keys[r].pop(0)) for r, i in plan.filled if keys.get(r)]
        plans.append(
            step=plan.step,
            new_requests=[request.id for request in plan.new_requests],
            chunk_requests=[chunk.request for chunk in plan.chunks],
            chunk_starts=[chunk.start for chunk in plan.chunks],
            chunk_tokens=[chunk.num_tokens for chunk in plan.chunks],
            joined=list(plan.joined),
            left=list(plan.left),
            preempted=list(plan.preempted),
            departed=list(plan.departed),
            block_requests=[owner for owner, _ in plan.new_blocks],
            block_counts=[len(blocks) for _, blocks in plan.new_blocks],
            block_ids=[block for _, blocks in plan.new_blocks for block in blocks],
            **swap_columns("out", plan.swapped_out),
            **swap_columns("in", plan.swapped_in),
            filled_requests=[request for request, _, _ in filled],
            filled_indices=[index for _, index, _ in filled],
            filled_keys=self._numbers(tuple(key for _, _, key in filled)),
            num_decodes=len(plan.decodes),
        )

    def _note_keys(self, request: Request) -> None:
        """Number the keys at intake, so that numbers follow the order of calls and a replay's are the same."""
        if self._keep_plans and request.prefix_keys is not None:
            self._prefix_keys[request.id] = self._numbers(request.prefix_keys)

    def _numbers(self, keys: tuple[Hashable, ...] | None) -> list[int] | None:
        """Keys as small integers, equal for equal keys throughout the record."""
        if keys is None:
            return None
        numbers = self._key_numbers
        return [numbers.setdefault(key, len(numbers)) for key in keys]


class _Columns:
    """One table under construction: compact arrays for plain integers, lists for the rest."""

    def __init__(self, table: str) -> None:
        self.schema = SCHEMAS[table]
        plain = {f.name for f in self.schema if pa.types.is_integer(f.type) and not f.nullable}
        self.columns: dict[str, Any] = {f.name: array("q") if f.name in plain else [] for f in self.schema}
        self._count = self.columns[self.schema.names[0]]

    def __len__(self) -> int:
        return len(self._count)

    def append(self, **row: Any) -> None:
        for name, value in row.items():
            self.columns[name].append(value)

    def cut(self, num_rows: int) -> None:
        for column in self.columns.values():
            del column[num_rows:]

    def table(self, num_rows: int | None = None) -> pa.Table:
        arrays = [pa.array(self.columns[f.name][:num_rows], type=f.type) for f in self.schema]
        return pa.Table.from_arrays(arrays, schema=self.schema)
