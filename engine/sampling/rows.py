"""Sampling parameters of the running requests, packed so that a step's batch is a gather, not a rebuild."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagedserve.engine.packing import send
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.sampling.adjustments import Adjustments, AdjustmentTable
from pagedserve.engine.sampling.fixed_point import SCALE_BITS
from pagedserve.engine.sampling.grammar import GrammarState
from pagedserve.engine.sampling.philox import noise_words

INITIAL_CAPACITY = 64

# How a row is sampled, in the order in which a batch takes its random rows. FILTER_GREEDY uses no noise.
FILTER_TOP_K, FILTER_NUCLEUS, FILTER_NONE, FILTER_GREEDY = range(4)

_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("min_p", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("seed", np.int64),
        ("sample_index", np.int64),
        ("num_top_logprobs", np.int64),
        ("filter", np.int8),
        ("wants_logprobs", np.bool_),
    ]
)


@dataclass(frozen=True, slots=True)
class SamplingLayout:
    """What stays the same from step to step while the same requests are sampled; S of R rows use noise.

    random_rows: int64 [S], rows of the batch: first num_top_k with top_k, then num_nucleus with top_p only.
    temperature: float32 [S]. top_p: float64 [S]. top_k: int64 [S], the vocabulary size for off.
    min_weight: int64 [S], min_p as a share of the largest fixed-point weight.
    largest_k: the largest top_k that is not off; 0 for none.
    logprob_rows: int64 [L], rows of the batch whose logprobs are wanted, num_top_logprobs of the others each;
    logprob_requests: whose rows these are.
    """

    requests: tuple[int, ...]
    random_rows: Tensor
    temperature: Tensor
    min_weight: Tensor
    top_k: Tensor
    top_p: Tensor
    num_top_k: int
    num_nucleus: int
    largest_k: int
    has_min_p: bool
    logprob_rows: Tensor
    logprob_requests: tuple[int, ...]
    num_top_logprobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """All that `sampler.sample` needs of one step. words: int64 [S], the noise of the layout's random rows."""

    vocab_size: int
    layout: SamplingLayout
    words: Tensor
    adjustments: Adjustments | None


class SamplingRows:
    """The requests that may be sampled, from intake to finish; preemption changes nothing here.

    The tensors of a batch are made on `device`; the table itself stays on the host.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._table = np.zeros(INITIAL_CAPACITY, dtype=_ROW)
        self._slots: dict[int, int] = {}
        self._free_slots = list(range(INITIAL_CAPACITY))
        self._adjustments = AdjustmentTable(vocab_size, self.device)
        self._layout: SamplingLayout | None = None
        self._no_words = torch.zeros(0, dtype=torch.int64, device=self.device)

    def __len__(self) -> int:
        return len(self._slots)

    def add(
        self,
        request: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_ids: Sequence[int],
        sample_index: int = 0,
        suppressed_ids: Sequence[int] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        """Take in a request. seed: params.seed, or the one drawn for it, signed 64 bits.

        suppressed_ids: what min_tokens keeps from being chosen, `stops.TokenStops.suppressed_ids`.
        grammar: the request's own, if it has one; whoever made it tells it of the tokens.
        Raises ValueError for an id outside the vocabulary.
        """
        assert request not in self._slots, f"request {request} is in the sampling rows already"
        params.validate_for_vocab(self.vocab_size)
        self._adjustments.add(
            request,
            params,
            prompt_ids=prompt_ids,
            first_stoppable=len(prompt_ids) + params.min_tokens,
            suppressed_ids=suppressed_ids,
            grammar=grammar,
        )
        if not self._free_slots:
            self._free_slots = list(range(len(self._table), 2 * len(self._table)))
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        slot = self._slots[request] = self._free_slots.pop()
        has_top_k = 0 < params.top_k < self.vocab_size
        self._table[slot] = (
            params.temperature,
            params.min_p,
            params.top_p,
            params.top_k if has_top_k else self.vocab_size,
            seed,
            sample_index,
            params.logprobs or 0,
            _filter_of(params, has_top_k),
            params.logprobs is not None,
        )
        self._layout = None

    def append(self, request: int, token_id: int) -> None:
        """A request's output grows; penalties depend on it."""
        self._adjustments.append(request, token_id)

    @property
    def told_by_tokens(self) -> set[int]:
        """Requests whose next token can be sampled only when all before were told by `append`."""
        return self._adjustments.told_by_tokens

    def remove(self, request: int) -> None:
        """Forget a finished or aborted request."""
        self._free_slots.append(self._slots.pop(request))
        self._adjustments.remove(request)
        self._layout = None

    def select(self, requests: tuple[int, ...], positions: Sequence[int] | np.ndarray) -> SamplingBatch:
        """The batch whose logits rows belong to `requests`, in that order.

        positions[i] is the index in its sequence of the token to be chosen: the number of tokens before it,
        prompt included. It alone ties the noise to the token, so it must not depend on how the token came to
        be computed.
        """
        rows = self._table[[self._slots[request] for request in requests]]
        layout = self._layout
        if layout is None or layout.requests != requests:
            layout = self._layout = self._make_layout(requests, rows)
        where = np.asarray(positions, dtype=np.int64)
        order = _random_rows(rows)
        random = rows[order]
        words = self._no_words
        if len(random):
            (words,) = send([noise_words(random["seed"], where[order], random["sample_index"])], self.device)
        adjustments = self._adjustments.select(requests, positions)
        return SamplingBatch(self.vocab_size, layout, words, adjustments)

    def _make_layout(self, requests: tuple[int, ...], rows: np.ndarray) -> SamplingLayout:
        order = _random_rows(rows)
        random = rows[order]
        logprob_rows = np.flatnonzero(rows["wants_logprobs"])
        has_top_k = random["filter"] == FILTER_TOP_K
        min_weight = np.ceil(random["min_p"] * 2.0**SCALE_BITS).astype(np.int64)
        arrays = (order, random["temperature"], min_weight, random["top_k"], random["top_p"], logprob_rows)
        random_rows, temperature, min_weight, top_k, top_p, wanted = send(arrays, self.device)
        return SamplingLayout(
            requests=requests,
            random_rows=random_rows,
            temperature=temperature,
            min_weight=min_weight,
            top_k=top_k,
            top_p=top_p,
            num_top_k=int(has_top_k.sum()),
            num_nucleus=int((random["filter"] == FILTER_NUCLEUS).sum()),
            largest_k=int(random["top_k"][has_top_k].max(initial=0)),
            has_min_p=bool((random["min_p"] > 0).any()),
            logprob_rows=wanted,
            logprob_requests=tuple([requests[row] for row in logprob_rows]),
            num_top_logprobs=tuple(rows["num_top_logprobs"][logprob_rows].tolist()),
        )


def _filter_of(params: SamplingParams, has_top_k: bool) -> int:
    if params.is_greedy:
        return FILTER_GREEDY
    if has_top_k:
        return FILTER_TOP_K
    return FILTER_NUCLEUS if params.top_p < 1.0 else FILTER_NONE


def _random_rows(rows: np.ndarray) -> np.ndarray:
    """Rows that use noise, grouped by what is done to them, so that a slice takes those of one kind."""
    random = np.flatnonzero(rows["filter"] != FILTER_GREEDY)
    return random[np.argsort(rows["filter"][random], kind="stable")]
