"""What recorded decode steps keep of a device, found out by recording some before the KV cache takes what is left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise

from pagedserve.engine.device_meter import Meter
from pagedserve.engine.graphs import make_graphs
from pagedserve.engine.model.model import Model
from pagedserve.policy import Limits

NUM_RECORDED = 4
"""The largest, whose pool of memory the others share, and a few more: what each of the others adds."""


def graph_bytes(model: Model, limits: Limits, meter: Meter) -> int:
    """Bytes of all graphs that an engine with these limits records; 0 where there are none.

    They are recorded on a cache of one block, into which their pointers go, and thrown away.
    """
    kv = model.make_cache(1, limits.block_size)
    meter.settle()
    free = [meter.free_bytes()]
    graphs = make_graphs(model, kv, limits.max_num_seqs, limits.max_model_len)
    if graphs is None:
        return 0
    for _ in islice(graphs.record(), NUM_RECORDED):
        meter.settle()
        free.append(meter.free_bytes())
    count = len(graphs.sizes)
    del graphs, kv
    meter.settle()
    return expected_bytes([before - after for before, after in pairwise(free)], count)


def expected_bytes(growths: Sequence[int], count: int) -> int:
    """Of ``count`` graphs, when the first of them, recorded one after the other, took ``growths`` each.

    Those that were not recorded are taken to need as much as the largest of the others but the first.
    """
    taken = [max(0, growth) for growth in growths]
    return sum(taken) + (count - len(taken)) * max(taken[1:], default=0)
