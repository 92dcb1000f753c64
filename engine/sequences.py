"""The worker's mirror of the scheduler: sequences, their tokens and block tables, from plan deltas alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from pagedserve.engine.model.batch import ForwardBatch
from pagedserve.engine.output_text import OutputTextState
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


class SequenceTable(Generic[AnySequence]):
    """Seats with block tables as arrays, so that a decode batch is a gather.

    ``apply`` takes the plans in launch order; ``batch`` lays out the step just applied: chunks first, then
    the decode group.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.sequences: dict[int, AnySequence] = {}
        self._device = device
        self._tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._last_token = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._free_seats = list(range(max_num_seqs - 1, -1, -1))
        self._decodes: tuple[int, ...] = ()
        self._decode_seats = np.zeros(0, dtype=np.int64)

    def apply(self, plan: StepPlan, newcomers: Mapping[int, AnySequence]) -> list[int]:
        """Follow a plan's changes; ``newcomers`` has those of ``new_requests``. Return the departed ids."""
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
        seat = sequence.seat
        held = int(self._num_blocks[seat])
        self._tables[seat, held : held + len(blocks)] = blocks
        self._num_blocks[seat] = held + len(blocks)

    def append_token(self, sequence: AnySequence, token_id: int) -> None:
        """A token was sampled."""
        sequence.token_ids.append(token_id)
        if sequence.seat is not None:
            self._last_token[sequence.seat] = token_id
            self._num_tokens[sequence.seat] += 1

    def batch(self, plan: StepPlan) -> ForwardBatch:
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
        tokens = [
            np.array(self.sequences[c.request].token_ids[c.start : c.start + c.num_tokens], dtype=np.int64)
            for c in plan.chunks
        ]
        width = int(-(-(contexts + lengths).max() // size))
        tables = self._tables[seats, :width]
        slots = tables[rows, positions // size].astype(np.int64) * size + positions % size
        return ForwardBatch(
            token_ids=self._tensor(np.concatenate([*tokens, self._last_token[decode_seats]])),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            block_tables=self._tensor(tables),
            query_start=self._tensor(np.concatenate([[0], ends]).astype(np.int32)),
            context_lens=self._tensor(contexts.astype(np.int32)),
            max_query_len=int(lengths.max()),
            max_context_len=int(contexts.max()),
            num_decodes=len(decode_seats),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
