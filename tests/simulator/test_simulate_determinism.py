"""M4: the same seed gives the same record in any process, in any order, under any hash seed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedserve.metrics.identity import content_digest, first_difference
from pagedserve.metrics.record import RunRecord
from pagedserve.policy import Limits
from pagedserve.simulator.devices import device
from pagedserve.simulator.geometry import geometry
from pagedserve.simulator.roofline import RooflineCost
from pagedserve.simulator.simulate import simulate
from pagedserve.traces.lengths import LogNormal
from pagedserve.traces.synthesis import SharedPrefixes, synthesize

POLICIES = ("static", "prefill_first", "vllm_v1")


def run(seed: int, policy: str, depth: int = 1) -> RunRecord:
    trace = synthesize(
        120,
        40.0,
        prompt=LogNormal(median=300, sigma=0.8, minimum=1, maximum=2000),
        output=LogNormal(median=60, sigma=0.7, minimum=1, maximum=400),
        prefixes=SharedPrefixes(5, 64),
        seed=seed,
    )
    limits = Limits(num_blocks=900, max_num_seqs=32, max_num_batched_tokens=512)
    cost = RooflineCost(device("l40s"), geometry("Llama-3.1-8B"))
    return simulate(trace, policy, cost, limits, overlap_depth=depth, keep_plans=True, client_timeout_s=20.0)


def digests(order: tuple[str, ...]) -> dict[str, str]:
    return {policy: content_digest(run(11, policy)) for policy in order}


def test_order_of_simulations_in_a_process_does_not_matter() -> None:
    assert digests(POLICIES) == digests(tuple(reversed(POLICIES)))


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_another_process_and_hash_seed_give_the_same_record(hash_seed: str) -> None:
    here = Path(__file__)
    code = f"import {here.stem} as t; print(t.digests(t.POLICIES))"
    path = os.pathsep.join([str(here.parent), str(here.parents[2])])
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(digests(POLICIES))


def test_another_seed_gives_another_record() -> None:
    assert first_difference(run(11, "vllm_v1"), run(12, "vllm_v1")) is not None


def test_a_record_survives_the_disk(tmp_path: Path) -> None:
    record = run(11, "vllm_v1")
    record.save(tmp_path / "run")
    assert first_difference(record, RunRecord.load(tmp_path / "run")) is None


def test_the_replay_of_a_simulation_is_that_simulation() -> None:
    """Recorded times, intake and stops lead the same replica through the same run."""
    record = run(11, "vllm_v1", depth=0)
    again = simulate(record, "vllm_v1")
    parts = ("calls", "steps", "plans", "requests", "emissions")
    assert first_difference(record, again, parts) is None
