"""The device profile: measured step times of a real runner, with provenance; one reader and one writer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from pagedserve.policy.plan import StepShape

PROFILE_VERSION = 1


class ProfileError(ValueError):
    """A profile file is not what this version reads: says which file and what is wrong."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One measured shape: from launch to the end of the wait, ``num_repeats`` times, quantiles in ns.

    ``kind`` says which part of the grid it belongs to: "chunk", "decode" or "mixed".
    """

    kind: str
    shape: StepShape
    p20_ns: int
    p50_ns: int
    p80_ns: int
    num_repeats: int


@dataclass(frozen=True, slots=True)
class HostPoint:
    """Host time between one step's end and the next one's launch, with ``num_rows`` sampled rows, in ns."""

    num_rows: int
    p20_ns: int
    p50_ns: int
    p80_ns: int
    num_repeats: int


@dataclass(frozen=True, slots=True)
class Profile:
    """All measurements of one device, dtype and model, and how they were taken.

    ``provenance`` names device, dtype, threads, attention backend, model and geometry, versions and date.
    """

    provenance: dict[str, Any]
    steps: tuple[StepPoint, ...]
    host: tuple[HostPoint, ...]

    def sha256(self) -> str:
        """The hash of the content, which a validation states beside its result."""
        return sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        return {
            "format_version": PROFILE_VERSION,
            "provenance": self.provenance,
            "steps": [asdict(point) for point in self.steps],
            "host": [asdict(point) for point in self.host],
        }

    def save(self, path: str | Path) -> None:
        """Write one JSON file, whole or not at all."""
        path = Path(path)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self._content(), indent=1) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile; raises `ProfileError` naming the file and what is wrong with it."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ProfileError(f"{path}: cannot be read as a profile: {error}") from error
        version = content.get("format_version") if isinstance(content, dict) else None
        if version != PROFILE_VERSION:
            raise ProfileError(f"{path}: format_version is {version!r}; this version reads {PROFILE_VERSION}")
        try:
            steps = tuple(_step(row) for row in content["steps"])
            host = tuple(HostPoint(**row) for row in content["host"])
            return cls(content["provenance"], steps, host)
        except (KeyError, TypeError) as error:
            raise ProfileError(
                f"{path}: a measurement is incomplete or has unknown fields: {error}"
            ) from error


def _step(row: dict[str, Any]) -> StepPoint:
    shape = dict(row["shape"])
    unknown = set(shape) - {field.name for field in fields(StepShape)}
    if unknown:
        raise TypeError(f"shape has {', '.join(sorted(unknown))}")
    shape["chunks"] = tuple((tokens, context) for tokens, context in shape["chunks"])
    return StepPoint(**{**row, "shape": StepShape(**shape)})
