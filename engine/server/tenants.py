"""Tenants as label values: few enough for whoever stores the metrics, however many names clients send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

MAX_TENANTS = 32
MAX_NAME_CHARS = 64
OTHERS = "other"


class TenantLabelsState:
    """Gives the first ``MAX_TENANTS`` names a label of their own, and the rest one label together.

    A name keeps its label, at 0 when it has nothing here, until a newer one needs the place.
    """

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}

    def fold(self, *counts: Mapping[str, int]) -> list[dict[str, int]]:
        """Each of several counts by tenant, as counts by label; all have the same labels, and the same sum."""
        present = {name: None for count in counts for name, value in count.items() if value}
        for name in present:
            self._admit(name, present)
        folded: list[dict[str, int]] = []
        for count in counts:
            by_label = Counter[str](dict.fromkeys(self._labels.values(), 0))
            for name, value in count.items():
                if value:
                    by_label[self._labels.get(name, OTHERS)] += value
            folded.append(dict(by_label))
        labels = {label: 0 for each in folded for label in each}
        return [labels | each for each in folded]

    def _admit(self, name: str, present: Mapping[str, None]) -> None:
        if name in self._labels:
            return
        if len(self._labels) == MAX_TENANTS:
            gone = next((old for old in self._labels if old not in present), None)
            if gone is None:
                return
            del self._labels[gone]
        self._labels[name] = shown_tenant(name)


def shown_tenant(name: str) -> str:
    """A tenant's name, short enough to show."""
    return name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 1]}…"
