"""Where simulated stops and block keys come from: the true output lengths, which no policy sees."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from pagedserve.policy.plan import Outcome, StepPlan


class TrueLengths:
    """Outcomes of plans, in launch order, at a cost that follows what changes.

    Follows the decode group through the plans' ``joined`` and ``left``: a request that joins with n tokens
    to go stops n rounds later. Keys of generated blocks are the recorded ones, or (request, block index).
    """

    def __init__(
        self,
        lengths: Mapping[int, int] | Sequence[int],
        generated_keys: Mapping[tuple[int, int], Hashable] | None = None,
        failed: frozenset[int] = frozenset(),
    ) -> None:
        """``failed`` requests end when their next token would come, with "error"; others with it, "stop"."""
        self._lengths = lengths
        self._failed = failed
        self._by_id = isinstance(lengths, Mapping)
        self._keys = generated_keys or {}
        self._num_rounds = 0
        self._num_sampled: dict[int, int] = {}
        self._joined_round: dict[int, int] = {}
        self._stops: defaultdict[int, list[int]] = defaultdict(list)

    def of(self, plan: StepPlan) -> list[Outcome]:
        """What the step brings beyond one more token for every request that samples."""
        for request in plan.left:
            joined = self._joined_round.pop(request, None)
            if joined is not None:
                self._num_sampled[request] += self._num_rounds - joined
        for request in plan.departed:
            self._num_sampled.pop(request, None)
        for request in plan.joined:
            self._join(request)
        stops = self._decode_stops() if plan.decodes else []
        for chunk in plan.chunks:
            if chunk.samples:
                sampled = self._num_sampled.get(chunk.request, 0) + 1
                self._num_sampled[chunk.request] = sampled
                if sampled == self._last_sample(chunk.request):
                    stops.append(chunk.request)
        if plan.filled:
            return self._with_keys(plan, stops)
        return [self._ending(request) for request in stops]

    def _ending(self, request: int, keys: tuple[Hashable, ...] = ()) -> Outcome:
        if request in self._failed:
            return Outcome(request, 0, "error", keys)
        return Outcome(request, 1, "stop", keys)

    def _last_sample(self, request: int) -> int | None:
        """Number, from 1, of the sample that ends the request; None: its limit does."""
        if not self._by_id:
            return self._lengths[request]
        length = self._lengths.get(request)  # pyright: ignore
        return length if length is None or request not in self._failed else length + 1

    def _join(self, request: int) -> None:
        self._joined_round[request] = self._num_rounds
        last = self._last_sample(request)
        if last is not None:
            self._stops[self._num_rounds + last - self._num_sampled[request] - 1].append(request)

    def _decode_stops(self) -> list[int]:
        """Requests whose round just planned brings their last token; then the round is done."""
        stops = []
        for request in dict.fromkeys(self._stops.pop(self._num_rounds, ())):
            joined = self._joined_round.get(request)
            # Entries of an earlier membership are dead: they would name another round.
            if joined is not None and self._num_sampled[
                request
            ] + self._num_rounds - joined + 1 == self._last_sample(request):
                stops.append(request)
        self._num_rounds += 1
        return stops

    def _with_keys(self, plan: StepPlan, stops: list[int]) -> list[Outcome]:
        keys: dict[int, list[Hashable]] = {request: [] for request in stops}
        for request, index in plan.filled:
            key = self._keys.get((request, index), (request, index))
            keys.setdefault(request, []).append(key)
        silent = {chunk.request for chunk in plan.chunks if not chunk.samples}
        return [
            self._ending(request, tuple(own))
            if request in stops
            else Outcome(request, int(request not in silent), None, tuple(own))
            for request, own in keys.items()
        ]
