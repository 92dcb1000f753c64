"""Step times interpolated from a device profile, and the host's time between steps.

A profile holds single chunks, decode groups, and a few combinations. Any step is put together from them:

    step = L(n + b)                      as one chunk of so many tokens without context: all that is paid by token
         + sum over chunks of C(n_i, c_i)    what context adds to a chunk; linear in it
         + D(b, mean context) - L(b)         what a decode group costs beyond its tokens: attention, sampling
         + k (longest - mean context)        unequal contexts, k from the profile's skewed groups
         + M(n, b)                           chunks beside decodes: measured, less what the lines above give
         + s (chunks - 1)                    every further chunk, from the profile's split steps
         - H, if nothing is sampled          the head's weights, from the profile's unsampled chunks
         + O(blocks out) + I(blocks in)      copies to and from host memory, if blocks are swapped

so that each measured step gets its own measured time back (skewed and split ones up to the quality of one
coefficient). Between measurements it is linear. Beyond the longest of them it goes on straight (M stays as it is at
its edge) and is counted in ``num_extrapolated``; cells of the grid that did not fit the limits when it was measured
are filled in from their neighbours, and not counted. No number is fitted to a run of the engine.
"""

from __future__ import annotations

from statistics import median
from typing import Any, Literal

import numpy as np

from pagedserve.metrics.profile import Profile, ProfileError
from pagedserve.policy.plan import StepShape
from pagedserve.simulator.cost import Int64Array, ShapeBatch
from pagedserve.simulator.interpolation import Line, Sheet
from pagedserve.simulator.measured_tables import (
    context_sheet,
    even_decodes,
    filled_sheet,
    mixed_sheet,
    slope,
    swap_lines,
    without_context,
)

Quantile = Literal["p20", "p50", "p80"]
QUANTILES: tuple[Quantile, ...] = ("p20", "p50", "p80")


class MeasuredCost:
    """A `pagedserve.simulator.cost.CostModel` from a `Profile`.

    ``quantile``: which of each measurement's repeats is believed; "p50" is the middle, "p20" and "p80" bound
    what the machine's noise may do. Raises ProfileError if the profile lacks chunks without context or
    decodes, without which no step can be put together.
    """

    __slots__ = (
        "_chunks",
        "_decodes",
        "_extra_chunk_ns",
        "_head_ns",
        "_host",
        "_longest",
        "_mixed",
        "_skew_ns",
        "_swaps",
        "_tokens",
        "num_extrapolated",
        "profile",
        "quantile",
    )

    def __init__(self, profile: Profile, quantile: Quantile = "p50") -> None:
        if quantile not in QUANTILES:
            raise ValueError(f"quantile is {quantile!r}; choose from {', '.join(QUANTILES)}")
        self.profile, self.quantile = profile, quantile
        self.num_extrapolated = 0
        field = f"{quantile}_ns"
        times: dict[str, list[tuple[StepShape, float]]] = {}
        for point in profile.steps:
            times.setdefault(point.kind, []).append((point.shape, float(getattr(point, field))))
        chunks = {shape.chunks[0]: ns for shape, ns in times.get("chunk", ())}
        even = even_decodes(profile.steps, field)
        self._swaps = swap_lines(profile.swaps, field)
        self._tokens = Line(without_context(chunks))
        self._chunks = context_sheet(chunks)
        self._decodes = filled_sheet(even)
        self._longest = max(shape.decode_context_max for shape, _ in times["decode"])
        self._skew_ns = self._extra_chunk_ns = self._head_ns = 0.0
        self._mixed: Sheet | None = None
        # What the parts so far do not explain, part by part.
        # Never below 0: noise must not make longer contexts or further chunks free.
        self._skew_ns = max(
            0.0,
            slope(
                [
                    (
                        shape.decode_context_max - shape.decode_context_sum / shape.num_decodes,
                        ns - self._step(shape),
                    )
                    for shape, ns in times["decode"]
                ]
            ),
        )
        heads = [self._step(shape) - ns for shape, ns in times.get("unsampled", ())]
        self._head_ns = max(0.0, median(heads)) if heads else 0.0
        extra = [(ns - self._step(shape)) / (len(shape.chunks) - 1) for shape, ns in times.get("split", ())]
        self._extra_chunk_ns = max(0.0, median(extra)) if extra else 0.0
        self._mixed = mixed_sheet(
            {
                (shape.chunks[0][0], shape.num_decodes): ns - self._step(shape)
                for shape, ns in times.get("mixed", ())
            }
        )
        self._host = Line({point.num_rows: float(getattr(point, field)) for point in profile.host})

    def step_ns(self, shape: StepShape) -> int:
        tokens = sum(chunk[0] for chunk in shape.chunks)
        context = max((chunk[1] for chunk in shape.chunks), default=0)
        self.num_extrapolated += (
            tokens + shape.num_decodes > self._tokens.axis.last
            or shape.num_decodes > self._decodes.rows.last
            or shape.decode_context_max > self._longest
            or context > self._chunks.columns.last
            or len(shape.chunks) + shape.num_decodes > self._host.axis.last
            or any(line.axis.last < count for line, count in zip(self._swaps, _swapped(shape), strict=False))
        )
        return max(1, round(self._step(shape)))

    def _step(self, shape: StepShape) -> float:
        tokens, rows = sum(chunk[0] for chunk in shape.chunks), shape.num_decodes
        total = self._tokens.at(tokens + rows)
        if rows:
            mean = shape.decode_context_sum / rows
            total = total + (self._decodes.at(rows, mean) - self._tokens.at(rows))
            total = total + self._skew_ns * (shape.decode_context_max - mean)
        if shape.chunks:
            total = total + sum(round(self._chunks.at(*chunk)) for chunk in shape.chunks)
            total = total + self._extra_chunk_ns * (len(shape.chunks) - 1)
            if rows and self._mixed is not None:
                most, widest = self._mixed.rows.last, self._mixed.columns.last
                total = total + self._mixed.at(min(tokens, most), min(rows, widest))
        if not shape.num_samples:
            total = total - self._head_ns
        for line, count in zip(self._priced(any(_swapped(shape))), _swapped(shape), strict=False):
            total = total + (max(0.0, line.at(count)) if count else 0.0)
        return total

    def steps_ns(self, batch: ShapeBatch) -> Int64Array:
        tokens, rows = batch.num_chunk_tokens, batch.num_decodes
        has_rows, has_chunks = rows > 0, batch.num_chunks > 0
        total = self._tokens.at_all(tokens + rows)
        mean = batch.decode_context_sum / np.maximum(rows, 1)
        decodes = total + (self._decodes.at_all(rows, mean) - self._tokens.at_all(rows))
        total = np.where(has_rows, decodes + self._skew_ns * (batch.decode_context_max - mean), total)
        added = np.rint(self._chunks.at_all(batch.chunk_tokens, batch.chunk_contexts)).astype(np.int64)
        sums = np.concatenate(([0], np.cumsum(added)))
        chunks = total + np.diff(sums[batch.chunk_offsets])
        total = np.where(has_chunks, chunks + self._extra_chunk_ns * (batch.num_chunks - 1), total)
        if self._mixed is not None:
            most, widest = self._mixed.rows.last, self._mixed.columns.last
            mixed = total + self._mixed.at_all(np.minimum(tokens, most), np.minimum(rows, widest))
            total = np.where(has_rows & has_chunks, mixed, total)
        total = np.where(batch.num_samples == 0, total - self._head_ns, total)
        swapped = _swapped(batch)
        for line, counts in zip(self._priced(np.any(swapped)), swapped, strict=False):
            total = total + np.where(counts > 0, np.maximum(0.0, line.at_all(counts)), 0.0)
        self._count_extrapolated(batch)
        return np.maximum(1, np.rint(total)).astype(np.int64)

    def _count_extrapolated(self, batch: ShapeBatch) -> None:
        too_deep = np.concatenate(([0], np.cumsum(batch.chunk_contexts > self._chunks.columns.last)))
        too_many = np.zeros(len(batch), dtype=bool)
        for line, counts in zip(self._swaps, _swapped(batch), strict=False):
            too_many |= counts > line.axis.last
        self.num_extrapolated += int(
            np.count_nonzero(
                too_many
                | (batch.num_chunk_tokens + batch.num_decodes > self._tokens.axis.last)
                | (batch.num_decodes > self._decodes.rows.last)
                | (batch.decode_context_max > self._longest)
                | (np.diff(too_deep[batch.chunk_offsets]) > 0)
                | (batch.num_chunks + batch.num_decodes > self._host.axis.last)
            )
        )

    def check_swaps(self, block_size: int) -> None:
        """See `pagedserve.simulator.cost.CostModel.check_swaps`."""
        self._priced(True)
        measured = self.profile.provenance.get("limits", {}).get("block_size")
        if measured != block_size:
            raise ProfileError(
                f"the profile measured swaps of KV blocks of {measured} tokens and the limits have {block_size}: "
                f"measure again with --block-size {block_size}"
            )

    def _priced(self, swaps: bool | np.bool_) -> tuple[Line, ...]:
        """The lines for blocks out and in. ProfileError if there are swaps to be priced and no lines."""
        if swaps and not self._swaps:
            raise ProfileError(
                "the profile has no measurements of swaps to host memory, and the policy swaps: measure again with "
                "'pagedserve profile', or let it recompute"
            )
        return self._swaps

    def host_ns(self, shape: StepShape) -> int:
        return max(0, round(self._host.at(len(shape.chunks) + shape.num_decodes)))

    def hosts_ns(self, batch: ShapeBatch) -> Int64Array:
        return np.maximum(0, np.rint(self._host.at_all(batch.num_chunks + batch.num_decodes))).astype(
            np.int64
        )

    def describe(self) -> dict[str, Any]:
        own = self.profile.provenance
        return {
            "name": "measured",
            "device": own.get("device_name", own.get("device")),
            "profile_sha256": self.profile.sha256(),
            "quantile": self.quantile,
            "parameters": {
                "skew_ns_per_token": self._skew_ns,
                "head_ns": self._head_ns,
                "extra_chunk_ns": self._extra_chunk_ns,
            },
            "sources": {"all": "measured; see provenance"},
            "provenance": own,
        }


def _swapped(steps: StepShape | ShapeBatch) -> tuple[Any, Any]:
    """Blocks out and in, of one step or of each."""
    return steps.num_blocks_swapped_out, steps.num_blocks_swapped_in
