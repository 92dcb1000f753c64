"""The device profile: measured step times of a real runner, with provenance; one reader and one writer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from pagedserve.policy.plan import StepShape

PROFILE_VERSION = 1
STEP_KINDS = ("chunk", "unsampled", "split", "decode", "mixed")
"""One chunk that ends its prompt; one that does not, so that nothing is sampled; several chunks; decodes;
decodes and a chunk."""
SWAP_DIRECTIONS = ("out", "in")
"""From the device to the host; from the host to the device."""
NOTHING: set[str] = set()
SWAPPED = ("num_blocks_swapped_out", "num_blocks_swapped_in")


class ProfileError(ValueError):
    """A profile file is not what this version reads: says which file and what is wrong."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One measured shape: from launch to the end of the wait, ``num_repeats`` times, quantiles in ns.

    ``kind`` says which part of the grid it belongs to, one of ``STEP_KINDS``.
    """

    kind: str
    shape: StepShape
    p20_ns: int
    p50_ns: int
    p80_ns: int
    num_repeats: int


@dataclass(frozen=True, slots=True)
class HostPoint:
    """Host time from one decode step's commit to the next one's launch, with ``num_rows`` rows, in ns."""

    num_rows: int
    p20_ns: int
    p50_ns: int
    p80_ns: int
    num_repeats: int


@dataclass(frozen=True, slots=True)
class SwapPoint:
    """Time to copy ``num_blocks`` KV blocks in one direction, of ``SWAP_DIRECTIONS``, and nothing else, in ns."""

    direction: str
    num_blocks: int
    p20_ns: int
    p50_ns: int
    p80_ns: int
    num_repeats: int


@dataclass(frozen=True, slots=True)
class Profile:
    """All measurements of one device, dtype and model, and how they were taken.

    ``swaps`` is empty where none were measured; then the file does not speak of them. ``provenance``
    holds plain JSON values: device, dtype, threads, attention backend, model and geometry,
    limits, grid, versions and date.
    """

    provenance: dict[str, Any]
    steps: tuple[StepPoint, ...]
    host: tuple[HostPoint, ...]
    swaps: tuple[SwapPoint, ...] = ()

    def sha256(self) -> str:
        """The hash of the content, which a validation states beside its result; the same after a load."""
        return sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        # What is nothing is left out, so that files from before there were swaps keep their hash.
        swaps = {"swaps": [asdict(point) for point in self.swaps]} if self.swaps else {}
        return {
            "format_version": PROFILE_VERSION,
            "provenance": self.provenance,
            "steps": [_step_row(point) for point in self.steps],
            "host": [asdict(point) for point in self.host],
            **swaps,
        }

    def save(self, path: str | Path) -> None:
        """Write one JSON file, whole or not at all."""
        path = Path(path)
        text = json.dumps(self._content(), indent=1, allow_nan=False) + "\n"
        part = path.with_name(path.name + ".part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile; raises `ProfileError` naming the file and what is wrong with it."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ProfileError(f"{path}: cannot be read as a profile: {error}") from error
        version = content.get("format_version") if isinstance(content, dict) else None
        if version != PROFILE_VERSION:
            raise ProfileError(f"{path}: format_version is {version!r}; this version reads {PROFILE_VERSION}")
        try:
            own = {"format_version", "provenance", "steps", "host"}
            _require(set(content), own, "the profile", optional={"swaps"})
            swaps = _rows(content, "swaps") if "swaps" in content else []
            if not isinstance(content["provenance"], dict):
                raise ProfileError(f"provenance: expected an object, found {content['provenance']!r}")
            return cls(
                content["provenance"],
                tuple(_step_point(row, f"steps[{i}]") for i, row in enumerate(_rows(content, "steps"))),
                tuple(_host_point(row, f"host[{i}]") for i, row in enumerate(_rows(content, "host"))),
                tuple(_swap_point(row, f"swaps[{i}]") for i, row in enumerate(swaps)),
            )
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from error


def _step_row(point: StepPoint) -> dict[str, Any]:
    row = asdict(point)
    shape = {name: value for name, value in row["shape"].items() if value or name not in SWAPPED}
    return {**row, "shape": shape}


def _rows(content: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(content[name], list) or not content[name]:
        raise ProfileError(f"{name}: expected a list of measurements, found {content[name]!r:.40}")
    return content[name]


def _step_point(row: Any, where: str) -> StepPoint:
    _require_fields(row, StepPoint, where)
    if row["kind"] not in STEP_KINDS:
        raise ProfileError(f"{where}.kind: expected one of {', '.join(STEP_KINDS)}, found {row['kind']!r}")
    _check_times(row, where)
    return StepPoint(**{**row, "shape": _shape(row["shape"], f"{where}.shape")})


def _host_point(row: Any, where: str) -> HostPoint:
    _require_fields(row, HostPoint, where)
    _check_times(row, where)
    return HostPoint(**{**row, "num_rows": _whole(row["num_rows"], f"{where}.num_rows", 1)})


def _swap_point(row: Any, where: str) -> SwapPoint:
    _require_fields(row, SwapPoint, where)
    if row["direction"] not in SWAP_DIRECTIONS:
        known = ", ".join(SWAP_DIRECTIONS)
        raise ProfileError(f"{where}.direction: expected one of {known}, found {row['direction']!r}")
    _check_times(row, where)
    return SwapPoint(**{**row, "num_blocks": _whole(row["num_blocks"], f"{where}.num_blocks", 1)})


def _shape(row: Any, where: str) -> StepShape:
    _require_fields(row, StepShape, where, optional=set(SWAPPED))
    numbers = {name: _whole(value, f"{where}.{name}") for name, value in row.items() if name != "chunks"}
    chunks = row["chunks"]
    if not isinstance(chunks, list) or not all(isinstance(c, list) and len(c) == 2 for c in chunks):
        raise ProfileError(f"{where}.chunks: expected pairs of tokens and context, found {chunks!r}")
    pairs = tuple((_whole(c[0], f"{where}.chunks", 1), _whole(c[1], f"{where}.chunks")) for c in chunks)
    return StepShape(chunks=pairs, **numbers)


def _check_times(row: dict[str, Any], where: str) -> None:
    times = [_whole(row[name], f"{where}.{name}") for name in ("p20_ns", "p50_ns", "p80_ns")]
    if times != sorted(times):
        raise ProfileError(f"{where}: p20_ns, p50_ns and p80_ns are {times}; quantiles cannot fall")
    _whole(row["num_repeats"], f"{where}.num_repeats", 1)


def _whole(value: Any, where: str, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ProfileError(f"{where}: expected a whole number of at least {least}, found {value!r}")
    return value


def _require_fields(row: Any, kind: Any, where: str, optional: set[str] = NOTHING) -> None:
    if not isinstance(row, dict):
        raise ProfileError(f"{where}: expected an object, found {row!r}")
    _require(set(row), {field.name for field in fields(kind)} - optional, where, optional)


def _require(found: set[str], wanted: set[str], where: str, optional: set[str] = NOTHING) -> None:
    if missing := wanted - found:
        raise ProfileError(f"{where}: {', '.join(sorted(missing))} is missing")
    if unknown := found - wanted - optional:
        raise ProfileError(f"{where}: {', '.join(sorted(unknown))} is unknown")
