"""A SimPy environment in integer nanoseconds in which events of one instant have a stated order."""

import simpy
from simpy.events import Event

# At one instant: commit, abort, add, schedule. SimPy pops equal times by priority, then by creation.
COMMIT, ABORT, ADD, SCHEDULE = 1, 2, 3, 4


class At(Event):
    """An event that happens at an absolute time in ns, in its place among the events of that instant."""

    def __init__(self, env: simpy.Environment, at_ns: int, priority: int) -> None:
        self.env = env
        self.callbacks = []
        self._value = None
        self._ok = True
        env.schedule(self, priority, at_ns - env.now)  # pyright: ignore


def instant_is_over(env: simpy.Environment) -> bool:
    """Whether no event is left at the present instant."""
    return env.peek() > env.now
