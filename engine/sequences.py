"""The worker's mirror of the scheduler: sequences, their tokens and block tables, from plan deltas alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from pagedserve.engine.layout import sampling_sequences
from pagedserve.engine.model.batch import ForwardBatch
from pagedserve.engine.output_text import OutputTextState
from pagedserve.engine.packing import send
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.sampling.grammar import GrammarState
from pagedserve.engine.sampling.logprobs import PositionLogprobs
from pagedserve.engine.stops import TokenStops
from pagedserve.policy import Request, StepPlan


@dataclass(slots=True, eq=False)
class SequenceState:
    """One request on the engine's side: its tokens, how it is sampled, and when it stops."""

    request: Request
    params: SamplingParams
    token_ids: list[int]
    """Prompt, then output."""
    stops: TokenStops
    text: OutputTextState
    seed: int
    sample_index: int = 0
    key_root: bytes = b""
    block_keys: list[bytes] = field(default_factory=list)
    grammar: GrammarState | None = None
    """How far the output has come in the form that it must have."""
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    """Of the prompt's second token on, as far as they are known, if they are wanted."""
    stop_after: int | None = None
    """A scripted stop: the request ends with this output token, whatever it is."""
    ended: bool = False
    """It stopped, failed or was aborted; what steps in flight still bring for it is dropped."""
    seat: int | None = None

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known on the host."""
        return len(self.token_ids) - self.request.num_prompt_tokens


class Mirrored(Protocol):
    """What the table needs of a sequence: its facts, its tokens, and a place for its seat."""

    @property
    def request(self) -> Request: ...

    @property
    def token_ids(self) -> list[int]: ...

    seat: int | None


@dataclass(slots=True, eq=False)
class MirrorState:
    """A sequence on a rank that samples nothing."""

    request: Request
    token_ids: list[int]
    seat: int | None = None


AnySequence = TypeVar("AnySequence", bound=Mirrored)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step as laid out on the host, which need not know the tokens of a step in flight; R rows are sampled.

    ``batch`` lacks the tokens of its decodes until `SequenceTable.complete`. On the device, int64:
    decode_seats [D]; sampled_seats, last_rows [R], the row of each one's last token in the batch;
    seated, seated_tokens [N]: seats taken with this step by sequences that decode at once, as a profiler plans it.
    positions: int64 [R] on the host, the place that each sampled token will have in its sequence.
    """

    batch: ForwardBatch
    decode_seats: torch.Tensor
    sampled_seats: torch.Tensor
    last_rows: torch.Tensor
    seated: torch.Tensor
    seated_tokens: torch.Tensor
    positions: np.ndarray


class SequenceTable(Generic[AnySequence]):
    """Seats with block tables as arrays, so that a decode batch is a gather.

    On the host, ``apply`` takes the plans in launch order, and ``lay_out`` lays out the step just applied: chunks
    first, then the decode group. In the device's order, ``complete`` is called before a step is computed and
    ``keep`` with what it sampled: ``last_tokens``, int64 [max_num_seqs], has each seat's newest token there, so
    that a decode can be laid out while its token is not known. Tokens in flight count from ``lay_out`` on.

    A seat may go to a newcomer while a step in flight is to write its former owner's token there. That is written
    first, as steps are computed in launch order, and nobody reads it: the newcomer reads what a later step wrote,
    or what ``complete`` puts there if it goes on without a chunk.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.sequences: dict[int, AnySequence] = {}
        self.seated: list[AnySequence] = []
        """Those that got a seat by the plan applied last."""
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._device = device
        self._tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._free_seats = list(range(max_num_seqs - 1, -1, -1))
        self._decodes: tuple[int, ...] = ()
        self._decode_seats = np.zeros(0, dtype=np.int64)

    def apply(self, plan: StepPlan, newcomers: Mapping[int, AnySequence]) -> list[int]:
        """Follow a plan's changes; ``newcomers`` has those of ``new_requests``. Return the departed ids."""
        self.seated = []
        for request in plan.departed:
            self._unseat(self.sequences.pop(request))
        for request in plan.preempted:
            if request in self.sequences:
                self._unseat(self.sequences[request])
        for request in plan.new_requests:
            self.sequences[request.id] = newcomers[request.id]
        for request, blocks in plan.new_blocks:
            self._append(self.sequences[request], blocks)
        if plan.decodes is not self._decodes and plan.decodes:
            self._decodes = plan.decodes
            self._decode_seats = np.array([self.sequences[r].seat for r in plan.decodes], dtype=np.int64)
        return list(plan.departed)

    def _unseat(self, sequence: AnySequence) -> None:
        if sequence.seat is not None:
            self._free_seats.append(sequence.seat)
            sequence.seat = None

    def _append(self, sequence: AnySequence, blocks: tuple[int, ...]) -> None:
        if sequence.seat is None:
            sequence.seat = seat = self._free_seats.pop()
            self._num_blocks[seat] = 0
            self._num_tokens[seat] = len(sequence.token_ids)
            self.seated.append(sequence)
        seat = sequence.seat
        held = int(self._num_blocks[seat])
        self._tables[seat, held : held + len(blocks)] = blocks
        self._num_blocks[seat] = held + len(blocks)

    def lay_out(self, plan: StepPlan) -> StepInputs:
        """The step's tokens, flattened; every sampled row's token is the last of its sequence."""
        size = self.block_size
        seats = np.concatenate(
            [
                np.array([self.sequences[chunk.request].seat for chunk in plan.chunks], dtype=np.int64),
                self._decode_seats if plan.decodes else np.zeros(0, dtype=np.int64),
            ]
        )
        decode_seats = seats[len(plan.chunks) :]
        starts = np.array([chunk.start for chunk in plan.chunks], dtype=np.int64)
        counts = np.array([chunk.num_tokens for chunk in plan.chunks], dtype=np.int64)
        contexts = np.concatenate([starts, self._num_tokens[decode_seats] - 1])
        lengths = np.concatenate([counts, np.ones(len(decode_seats), dtype=np.int64)])
        ends = np.cumsum(lengths)
        rows = np.repeat(np.arange(len(seats)), lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths) + np.repeat(contexts, lengths)
        width = int(-(-(contexts + lengths).max() // size))
        tables = self._tables[seats, :width]
        slots = tables[rows, positions // size].astype(np.int64) * size + positions % size
        sampling = sampling_sequences(plan)
        self._num_tokens[seats[sampling]] += 1
        arrays = (
            np.concatenate([*self._chunk_tokens(plan), np.zeros(len(decode_seats), dtype=np.int64)]),
            positions,
            slots,
            tables,
            np.concatenate([[0], ends]).astype(np.int32),
            contexts.astype(np.int32),
            decode_seats,
            seats[sampling],
            ends[sampling] - 1,
            *self._going_on(plan),
        )
        token_ids, places, slot_mapping, block_tables, query_start, context_lens, *others = send(
            arrays, self._device
        )
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=places,
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            query_start=query_start,
            context_lens=context_lens,
            max_query_len=int(lengths.max()),
            max_context_len=int(contexts.max()),
            num_decodes=len(decode_seats),
        )
        return StepInputs(batch, *others, positions=(contexts + lengths)[sampling])

    def _chunk_tokens(self, plan: StepPlan) -> list[np.ndarray]:
        """The tokens of every chunk, all of which the host knows."""
        found = []
        for chunk in plan.chunks:
            known = self.sequences[chunk.request].token_ids
            end = chunk.start + chunk.num_tokens
            assert len(known) >= end, f"{chunk} of a sequence of which {len(known)} tokens are known"
            found.append(np.array(known[chunk.start : end], dtype=np.int64))
        return found

    def _going_on(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Seats and newest tokens of those that were seated and have no chunk."""
        chunked = {chunk.request for chunk in plan.chunks} if self.seated else set()
        going_on = [sequence for sequence in self.seated if sequence.request.id not in chunked]
        return (
            np.array([sequence.seat for sequence in going_on], dtype=np.int64),
            np.array([sequence.token_ids[-1] for sequence in going_on], dtype=np.int64),
        )

    def complete(self, inputs: StepInputs) -> ForwardBatch:
        """The batch with all of its tokens. Called in launch order, once all steps before were kept."""
        if len(inputs.seated):
            self.last_tokens.index_copy_(0, inputs.seated, inputs.seated_tokens)
        num_decodes = len(inputs.decode_seats)
        if num_decodes:
            tokens = inputs.batch.token_ids[-num_decodes:]
            tokens.copy_(self.last_tokens.index_select(0, inputs.decode_seats))
        return inputs.batch

    def keep(self, inputs: StepInputs, token_ids: torch.Tensor) -> None:
        """Note what the step sampled, int64 [R] on the device."""
        self.last_tokens.index_copy_(0, inputs.sampled_seats, token_ids)
