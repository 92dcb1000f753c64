"""The heap of a process that serves for long, out of the way of Python's garbage collector."""

import gc


def settle_heap() -> None:
    """Take all objects that live now out of the garbage collector's sight, for good.

    Libraries and a loaded model are half a million objects; a full collection looks at each of them, which
    stops a run for about 0.2 s whenever it falls due. Call it once, after loading, in a process that serves;
    not in a notebook, where what is frozen would never be freed if it is part of a cycle.
    """
    gc.collect()
    gc.freeze()
