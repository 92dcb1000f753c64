"""How punctual a replay was: it is as good as its clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedserve.metrics.record import RunRecord


@dataclass(frozen=True, slots=True)
class SendLag:
    """How late requests were sent, in seconds."""

    p50_s: float
    max_s: float

    @classmethod
    def of(cls, record: RunRecord) -> SendLag:
        """Actual less planned send of every request of a live record; NaN if there is none."""
        late = (record.array("requests", "arrival_ns") - record.array("requests", "due_ns")) / 1e9
        if not late.size:
            return cls(float("nan"), float("nan"))
        return cls(float(np.median(late)), float(late.max()))
