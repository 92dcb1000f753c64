"""Azure LLM inference traces of 2023 and 2024: a date, prompt tokens, output tokens.

Both are CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens. 2023 writes
``YYYY-MM-DD HH:MM:SS.fffffff`` without a time zone (taken as UTC); 2024 writes
``YYYY-MM-DD HH:MM:SS[.ffffff]+00:00``, without a fraction on a whole second.
Source: github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from functools import lru_cache

from pagedserve.traces.rows import (
    FieldError,
    NumberedLines,
    RowsState,
    output_tokens,
    prompt_tokens,
    split_csv,
)

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOMENT = re.compile(
    r"(\d{4}-\d\d-\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:([+-])(\d\d):(\d\d))?", re.ASCII
)
_EPOCH_DAY = date(1970, 1, 1).toordinal()


def timestamp_ns(text: str, has_zone: bool) -> int:
    """Nanoseconds since the Unix epoch, exact to the last of up to 9 fractional digits.

    A zone must be there or not, as ``has_zone`` says: a file that mixes both has no one clock.
    """
    match = _MOMENT.fullmatch(text)
    if match is None:
        shape = "YYYY-MM-DD HH:MM:SS[.fraction of at most 9 digits]" + ("+HH:MM" if has_zone else "")
        raise FieldError("TIMESTAMP", text, f"is not {shape}")
    day, hour, minute, second, fraction, sign, zone_hour, zone_minute = match.groups()
    if (sign is not None) != has_zone:
        wanted = "has no time zone, but azure2024" if has_zone else "has a time zone, but azure2023"
        raise FieldError("TIMESTAMP", text, f"{wanted} {'needs' if has_zone else 'must not have'} one")
    if hour > "23" or minute > "59" or second > "59":
        raise FieldError("TIMESTAMP", text, "is not a time of day")
    seconds = _day_number(day) * 86_400 + int(hour) * 3600 + int(minute) * 60 + int(second)
    if sign is not None:
        zone = int(zone_hour) * 3600 + int(zone_minute) * 60
        seconds += zone if sign == "-" else -zone
    return seconds * 1_000_000_000 + (int(fraction.ljust(9, "0")) if fraction else 0)


@lru_cache(maxsize=64)
def _day_number(day: str) -> int:
    """Days since 1970-01-01; the year must be one whose nanoseconds fit 64 bits."""
    try:
        number = date.fromisoformat(day).toordinal() - _EPOCH_DAY
    except ValueError as error:
        raise FieldError("TIMESTAMP", day, "is not a date of the calendar") from error
    if not "1971" <= day[:4] <= "2261":
        raise FieldError("TIMESTAMP", day, "is outside the years 1971..2261")
    return number


def parse_2023(lines: NumberedLines, rows: RowsState) -> None:
    """Read every row of a 2023 file."""
    _parse(lines, rows, has_zone=False)


def parse_2024(lines: NumberedLines, rows: RowsState) -> None:
    """Read every row of a 2024 file."""
    _parse(lines, rows, has_zone=True)


def _parse(lines: NumberedLines, rows: RowsState, has_zone: bool) -> None:
    line, text = next(lines)
    rows.arrival_field, rows.output_field = "TIMESTAMP", "GeneratedTokens"
    header = rows.find_columns(line, rows.header_names(line, text), COLUMNS)
    for line, text in lines:
        try:
            moment, context, generated = header.pick(text)
            arrival_ns = timestamp_ns(moment, has_zone)
            num_prompt = prompt_tokens("ContextTokens", context)
            num_output = output_tokens("GeneratedTokens", generated)
        except FieldError as error:
            rows.reject(line, error)
        else:
            rows.add(line, arrival_ns, num_prompt, num_output)


def recognises_2023(head: Sequence[str]) -> bool:
    """Whether the first lines look like a 2023 file."""
    return _recognises(head, has_zone=False)


def recognises_2024(head: Sequence[str]) -> bool:
    """Whether the first lines look like a 2024 file."""
    return _recognises(head, has_zone=True)


def _recognises(head: Sequence[str], has_zone: bool) -> bool:
    """By header and first date; with no row to look at, both years are possible."""
    try:
        names = split_csv(head[0])
        if not set(COLUMNS) <= set(names):
            return False
        if len(head) > 1:
            timestamp_ns(dict(zip(names, split_csv(head[1]), strict=False)).get("TIMESTAMP", ""), has_zone)
    except FieldError:
        return False
    return True
