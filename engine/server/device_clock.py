"""How an engine's time divides into steps in flight, gaps between them, and having nothing to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedserve.engine.server.histograms import GAP_S, HistogramState


@dataclass(slots=True)
class DeviceClockState:
    """Is told of launches and commits, and of whether there is something to launch.

    A step is in flight from the loop's ``launched`` to its ``committed``, both as the loop tells them: right
    after the launch, and right after the wait for it. A gap begins when the last step in flight is committed
    while requests are left, or when a request comes to an idle device; it ends at the next launch. It counts
    for nothing if the policy plans an empty step meanwhile, or the last request is aborted: then there was
    nothing to launch. So a gap is time that only the host spent: the policy, the listeners, the runner.
    """

    gap: HistogramState = field(default_factory=lambda: HistogramState(GAP_S))
    busy_s: float = 0.0
    """Time with a step in flight."""
    _num_in_flight: int = 0
    _busy_since_ns: int = 0
    _idle_since_ns: int | None = None

    def has_work(self, now_ns: int) -> None:
        """There is something to launch from now on, if there was not before."""
        if not self._num_in_flight and self._idle_since_ns is None:
            self._idle_since_ns = now_ns

    def has_none(self) -> None:
        """There is nothing to launch."""
        self._idle_since_ns = None

    def launched(self, now_ns: int) -> None:
        """A step is on the device."""
        if not self._num_in_flight:
            self._busy_since_ns = now_ns
            if self._idle_since_ns is not None:
                self.gap.observe((now_ns - self._idle_since_ns) / 1e9)
                self._idle_since_ns = None
        self._num_in_flight += 1

    def committed(self, now_ns: int, requests_left: bool) -> None:
        """The oldest step is done."""
        self._num_in_flight -= 1
        if not self._num_in_flight:
            self.busy_s += (now_ns - self._busy_since_ns) / 1e9
            self._idle_since_ns = now_ns if requests_left else None
