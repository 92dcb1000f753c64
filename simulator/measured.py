"""Step times interpolated from a device profile, and the host's time between steps.

A profile holds single chunks, decode groups, and a few combinations. Any step is put together from them:

    step = L(n + b)                      as one chunk of so many tokens without context: all that is paid by token
         + sum over chunks of C(n_i, c_i)    what context adds to a chunk; linear in it
         + D(b, mean context) - L(b)         what a decode group costs beyond its tokens: attention, sampling
         + k (longest - mean context)        unequal contexts, k from the profile's skewed groups
         + M(n, b)                           chunks beside decodes: measured, less what the lines above give
         + s (chunks - 1)                    every further chunk, from the profile's split steps
         - H, if nothing is sampled          the head's weights, from the profile's unsampled chunks

so that each measured step gets its own measured time back (skewed and split ones up to the quality of one
coefficient). Between measurements it is linear. Beyond the longest of them it goes on straight (M stays as it is at
its edge) and is counted in ``num_extrapolated``; cells of the grid that did not fit the limits when it was measured
are filled in from their neighbours, and not counted. No number is fitted to a run of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

import numpy as np

from pagedserve.metrics.profile import Profile, ProfileError, StepPoint
from pagedserve.policy.plan import StepShape
from pagedserve.simulator.cost import Int64Array, ShapeBatch
from pagedserve.simulator.interpolation import Line, Sheet

Quantile = Literal["p20", "p50", "p80"]
QUANTILES: tuple[Quantile, ...] = ("p20", "p50", "p80")
Cells = dict[tuple[int, int], float]


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
        even = _even_decodes(profile.steps, field)
        self._tokens = Line(_without_context(chunks))
        self._chunks = _context_sheet(chunks)
        self._decodes = _filled_sheet(even)
        self._longest = max(shape.decode_context_max for shape, _ in times["decode"])
        self._skew_ns = self._extra_chunk_ns = self._head_ns = 0.0
        self._mixed: Sheet | None = None
        # What the parts so far do not explain, part by part.
        # Never below 0: noise must not make longer contexts or further chunks free.
        self._skew_ns = max(
            0.0,
            _slope(
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
        self._mixed = _mixed_sheet(
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
        self._count_extrapolated(batch)
        return np.maximum(1, np.rint(total)).astype(np.int64)

    def _count_extrapolated(self, batch: ShapeBatch) -> None:
        too_deep = np.concatenate(([0], np.cumsum(batch.chunk_contexts > self._chunks.columns.last)))
        self.num_extrapolated += int(
            np.count_nonzero(
                (batch.num_chunk_tokens + batch.num_decodes > self._tokens.axis.last)
                | (batch.num_decodes > self._decodes.rows.last)
                | (batch.decode_context_max > self._longest)
                | (np.diff(too_deep[batch.chunk_offsets]) > 0)
                | (batch.num_chunks + batch.num_decodes > self._host.axis.last)
            )
        )

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


def _without_context(chunks: Mapping[tuple[int, int], float]) -> dict[int, float]:
    found = {tokens: ns for (tokens, context), ns in chunks.items() if context == 0}
    if not found:
        raise ProfileError(
            "the profile has no chunk without context: measure again, with chunk_contexts from 0"
        )
    return found


def _even_decodes(steps: Sequence[StepPoint], field: str) -> Cells:
    """Times of groups whose contexts are all equal, by batch size and context."""
    found = {
        (point.shape.num_decodes, point.shape.decode_context_max): float(getattr(point, field))
        for point in steps
        if point.kind == "decode"
        and point.shape.decode_context_max * point.shape.num_decodes == point.shape.decode_context_sum
    }
    if not found:
        raise ProfileError("the profile has no decode group of equal contexts: measure again")
    return found


def _context_sheet(chunks: Mapping[tuple[int, int], float]) -> Sheet:
    """What context adds to a chunk, by tokens and context."""
    base = _without_context(chunks)
    added = {(n, c): ns - base[n] for (n, c), ns in chunks.items() if n in base}
    return _filled_sheet(added)


def _filled_sheet(cells: Cells) -> Sheet:
    """A full grid; a cell that did not fit the limits continues its row, or is scaled from the row before.

    Both hold because the time grows straight with the context and, by context, with the number of rows.
    """
    rows, columns = sorted({row for row, _ in cells}), sorted({column for _, column in cells})
    table: list[list[float]] = []
    for row in rows:
        line: list[float] = []
        for index, column in enumerate(columns):
            if (row, column) in cells:
                line.append(cells[row, column])
            elif index > 1:
                slope = (line[-1] - line[-2]) / (columns[index - 1] - columns[index - 2])
                line.append(line[-1] + slope * (column - columns[index - 1]))
            elif table and index == 1:
                before = (table[-1][1] - table[-1][0]) * row / rows[len(table) - 1]
                line.append(line[0] + before)
            elif table:
                line.append(table[-1][index] * row / rows[len(table) - 1])
            else:
                raise ProfileError(f"the profile lacks its smallest measurement at {column}: measure again")
        table.append(line)
    return Sheet(rows, columns, table)


def _mixed_sheet(residuals: Cells) -> Sheet | None:
    """What chunks beside decodes cost beyond both, 0 where there is only one of them; None: not measured."""
    if not residuals:
        return None
    filled = _filled_mixed(residuals)
    rows, columns = sorted({n for n, _ in filled}), sorted({b for _, b in filled})
    values = [[0.0] * (len(columns) + 1)]
    values += [[0.0, *(filled[n, b] for b in columns)] for n in rows]
    return Sheet([0, *rows], [0, *columns], values)


def _filled_mixed(cells: Cells) -> Cells:
    """Combinations that did not fit take the nearest measured one's residual."""
    rows, columns = {n for n, _ in cells}, {b for _, b in cells}
    return {
        (n, b): cells[
            min(cells, key=lambda cell: abs(cell[0] - n) / max(rows) + abs(cell[1] - b) / max(columns))
        ]
        for n in rows
        for b in columns
    }


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """The least-squares line through the origin."""
    weight = sum(x * x for x, _ in points)
    return sum(x * y for x, y in points) / weight if weight else 0.0
