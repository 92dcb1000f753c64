"""The tables of a measured cost model, made of a profile's points: holes filled, contradictions refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedserve.metrics.profile import SWAP_DIRECTIONS, ProfileError, StepPoint, SwapPoint
from pagedserve.simulator.interpolation import Line, Sheet

Cells = dict[tuple[int, int], float]


def swap_lines(swaps: Sequence[SwapPoint], field: str) -> tuple[Line, ...]:
    """Times by number of blocks, out and in; none if the profile has none."""
    if not swaps:
        return ()
    found = {
        way: {p.num_blocks: float(getattr(p, field)) for p in swaps if p.direction == way}
        for way in SWAP_DIRECTIONS
    }
    for way, points in found.items():
        if not points:
            raise ProfileError(f"the profile has swaps in one direction, and none {way}: measure again")
    return tuple(Line(points) for points in found.values())


def without_context(chunks: Mapping[tuple[int, int], float]) -> dict[int, float]:
    found = {tokens: ns for (tokens, context), ns in chunks.items() if context == 0}
    if not found:
        raise ProfileError(
            "the profile has no chunk without context: measure again, with chunk_contexts from 0"
        )
    return found


def even_decodes(steps: Sequence[StepPoint], field: str) -> Cells:
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


def context_sheet(chunks: Mapping[tuple[int, int], float]) -> Sheet:
    """What context adds to a chunk, by tokens and context."""
    base = without_context(chunks)
    added = {(n, c): ns - base[n] for (n, c), ns in chunks.items() if n in base}
    return filled_sheet(added)


def filled_sheet(cells: Cells) -> Sheet:
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


def mixed_sheet(residuals: Cells) -> Sheet | None:
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


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The least-squares line through the origin."""
    weight = sum(x * x for x, _ in points)
    return sum(x * y for x, y in points) / weight if weight else 0.0
