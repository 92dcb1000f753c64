"""The tables of a run record: every column's name, Arrow type, meaning and unit."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

FORMAT_VERSION = 3
READ_VERSIONS = (1, 2, 3)  # version 1 knew no records of clients, 2 no swaps: `SINCE_VERSION_3`
KINDS = ("simulated", "live", "client")
FINISH_REASONS = ("stop", "length", "abort", "timeout", "refused", "error", "unfinished")
CALL_KINDS = ("add", "abort", "schedule", "commit")

I64, I32, TEXT, LIST = pa.int64(), pa.int32(), pa.string(), pa.list_(pa.int64())


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its Arrow type, its meaning and unit, whether it may be null, its words."""

    name: str
    type: pa.DataType
    meaning: str
    nullable: bool = False
    words: tuple[str, ...] | None = None


STEPS = (  # State columns describe the moment after this step was scheduled.
    Column("step", I64, "step number, strictly increasing"),
    Column("schedule_ns", I64, "when the step was planned"),
    Column("launch_ns", I64, "when the device began it: handed over, or the step before committed, if later"),
    Column("commit_ns", I64, "when its outcomes were committed: the time of the tokens it emitted"),
    Column("num_prefill_tokens", I32, "prompt or recomputed tokens computed in prefill chunks"),
    Column("num_decode_tokens", I32, "tokens computed by the decode group, one a request"),
    Column("num_running", I32, "requests holding a place in the batch"),
    Column("num_waiting", I32, "requests waiting, preempted ones included"),
    Column("num_blocks_used", I32, "blocks referenced by requests, quarantined ones included"),
    Column("num_blocks_cached", I32, "blocks nobody references whose content the prefix cache keeps"),
    Column("num_blocks_free", I32, "blocks with no content"),
    Column("num_wasted_slots", I64, "token slots in used blocks that hold no token"),
    Column("num_preemptions", I32, "requests preempted by this step's plan"),
    Column("num_discarded_tokens", I32, "tokens this step computed for requests that had already stopped"),
    Column("num_recomputed_tokens", I32, "tokens this step computed again after a preemption"),
    Column("num_prefix_hit_tokens", I32, "tokens the prefix cache saved this step from computing"),
    Column("num_blocks_swapped_out", I32, "blocks copied to host memory before this step computed"),
    Column("num_blocks_swapped_in", I32, "blocks copied back from host memory before this step computed"),
    Column("num_cpu_blocks_used", I32, "blocks of host memory that hold KV of preempted requests"),
    Column("plan_digest", I64, "hash of the step's plan"),
)
REQUESTS = (
    Column("request", I64, "request id, unique"),
    Column("due_ns", I64, "when the request was planned to be sent"),
    Column("arrival_ns", I64, "when it was sent: latencies count from here"),
    Column("num_prompt_tokens", I64, "prompt length"),
    Column("max_tokens", I64, "declared limit of the output length"),
    Column("num_output_tokens", I64, "tokens emitted"),
    Column("finish_reason", TEXT, "how it ended", words=FINISH_REASONS),
    Column("first_schedule_ns", I64, "when a step first included it; null: never", nullable=True),
    Column("finish_ns", I64, "when it ended; null: it had not", nullable=True),
    Column("num_preemptions", I32, "how often it was preempted"),
    Column("num_prefix_hit_tokens", I64, "prompt tokens found in the prefix cache at first admission"),
    Column("num_recomputed_tokens", I64, "tokens computed again after preemptions"),
    Column("priority", I32, "as given by the caller"),
    Column("tenant", TEXT, "as given by the caller"),
    Column("deadline_ns", I64, "as given by the caller; null: none", nullable=True),
    Column("predicted_output_tokens", I64, "as given by the caller; null: none", nullable=True),
    Column("error", TEXT, "why it was refused or failed; null: it was not", nullable=True),
    Column("prefix_keys", LIST, "keys of its full prompt blocks; null: not cacheable", nullable=True),
)
EMISSIONS = (  # A run of tokens of one request; see metrics.tokens for how it expands.
    Column("request", I64, "request id"),
    Column("first_step", I64, "step that emitted the first token of the run"),
    Column("num_steps", I64, "tokens in the run: the others come one in each following step that decodes"),
)
CALLS = (  # Every call of the scheduler's four verbs, in order.
    Column("kind", pa.dictionary(I32, TEXT), "verb", words=CALL_KINDS),
    Column("subject", I64, "request id or step; null: a schedule that planned nothing", nullable=True),
    Column("now_ns", I64, "the time passed in"),
)
PLANS = (  # One row a step, the plan as flat lists: entry j of the lists of one group belongs together.
    Column("step", I64, "step number"),
    Column("new_requests", LIST, "requests the worker hears of for the first time"),
    Column("chunk_requests", LIST, "prefill chunks: request"),
    Column("chunk_starts", LIST, "prefill chunks: tokens already in KV"),
    Column("chunk_tokens", LIST, "prefill chunks: tokens to compute"),
    Column("joined", LIST, "requests that enter the decode group"),
    Column("left", LIST, "requests that leave the decode group"),
    Column("preempted", LIST, "requests preempted"),
    Column("departed", LIST, "requests whose state the worker drops"),
    Column("block_requests", LIST, "appended blocks: request"),
    Column("block_counts", LIST, "appended blocks: how many of block_ids are this request's"),
    Column("block_ids", LIST, "appended blocks: ids, requests one after another"),
    Column("out_requests", LIST, "swapped out: request"),
    Column("out_counts", LIST, "swapped out: how many of the blocks are this request's"),
    Column("out_blocks", LIST, "swapped out: blocks, requests one after another"),
    Column("out_host_blocks", LIST, "swapped out: the host blocks they are copied to"),
    Column("in_requests", LIST, "swapped in: request"),
    Column("in_counts", LIST, "swapped in: how many of the blocks are this request's"),
    Column("in_blocks", LIST, "swapped in: blocks, requests one after another"),
    Column("in_host_blocks", LIST, "swapped in: the host blocks they are copied from"),
    Column("filled_requests", LIST, "blocks this step fills: request"),
    Column("filled_indices", LIST, "blocks this step fills: index in the request's block table"),
    Column("filled_keys", LIST, "blocks this step fills: prefix key"),
    Column("num_decodes", I32, "requests in the decode group"),
)
TABLES: dict[str, tuple[Column, ...]] = {
    "steps": STEPS,
    "requests": REQUESTS,
    "emissions": EMISSIONS,
    "calls": CALLS,
    "plans": PLANS,
}
OPTIONAL_TABLES = ("plans",)
SINCE_VERSION_3: dict[str, frozenset[str]] = {
    **dict.fromkeys(TABLES, frozenset()),
    "steps": frozenset(("num_blocks_swapped_out", "num_blocks_swapped_in", "num_cpu_blocks_used")),
    "plans": frozenset(c.name for c in PLANS if c.name.startswith(("out_", "in_"))),
}
UNSEEN: dict[str, frozenset[str]] = {
    **dict.fromkeys(TABLES, frozenset()),
    "steps": frozenset(c.name for c in STEPS) - {"step", "commit_ns"},
    "requests": frozenset(("num_preemptions", "num_prefix_hit_tokens", "num_recomputed_tokens")),
}
SCHEMAS: dict[str, pa.Schema] = {
    table: pa.schema([pa.field(c.name, c.type, c.nullable) for c in columns])
    for table, columns in TABLES.items()
}
CLIENT_SCHEMAS: dict[str, pa.Schema] = {
    table: pa.schema([pa.field(c.name, c.type, c.nullable or c.name in UNSEEN[table]) for c in columns])
    for table, columns in TABLES.items()
}
