"""A tiny engine, and a profile of a device that is nothing like it: for what is right whatever the times."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from pagedserve.engine.engine import Engine
from pagedserve.engine.intake import Vocabulary
from pagedserve.engine.model.model import Model
from pagedserve.engine.profile_grid import Grid
from pagedserve.engine.profiler import profile_engine
from pagedserve.engine.tiny import tiny_model
from pagedserve.metrics.profile import Profile
from pagedserve.policy import Limits, policy

# Matrices this small lose more to the threads' barriers than they gain, most of all on a busy machine.
torch.set_num_threads(1)

LIMITS = Limits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256, block_size=4, num_blocks=160)
GRID = Grid((1, 16, 32), (0, 64), (1, 4), (8, 64), (16,), (2,), (1, 4))


@cache
def _tiny() -> tuple[Model, Vocabulary]:
    return tiny_model(seed=3)


@contextmanager
def idle_engine(limits: Limits = LIMITS) -> Iterator[Engine]:
    """An engine without requests, closed at the end."""
    engine = Engine(*_tiny(), policy("mixed"), limits)
    try:
        yield engine
    finally:
        engine.close()


@cache
def tiny_profile() -> Profile:
    """Measured once, in a hurry."""
    with idle_engine() as engine:
        return profile_engine(engine, "tiny", GRID, num_repeats=1)
