"""How many scheduler iterations a second one core does, and where the time goes.

An iteration is one ``schedule`` and one ``commit`` with a steady number of running requests: as one ends,
another is added, so that prompts, appended blocks, endings and admissions are all in the figure. Times are
process CPU time, since machines are shared; nothing is coalesced.

    python benchmarks/scheduler_iterations.py --running 128 --profile
"""

import argparse
import cProfile
import pstats
import random
import time

from pagedserve.policy import Limits, Outcome, Request, Scheduler, policy


class Load:
    """A scheduler kept at ``running`` requests of 200 to 1500 prompt and 50 to 400 output tokens."""

    def __init__(self, running: int, depth: int, prefix_caching: bool, seed: int) -> None:
        limits = Limits(num_blocks=running * 130, max_num_seqs=running, max_num_batched_tokens=2048)
        self.scheduler = Scheduler(policy("vllm_v1", enable_prefix_caching=prefix_caching), limits, depth)
        self._rng = random.Random(seed)
        self._caching = prefix_caching
        self._depth = depth
        self._num_added = 0
        self._plans = []
        for _ in range(running + 20):
            self._add()

    def _add(self) -> None:
        number, prompt = self._num_added, self._rng.randint(200, 1500)
        keys = tuple((number, i) for i in range(prompt // 16)) if self._caching else None
        self.scheduler.add(Request(number, number, prompt, self._rng.randint(50, 400), keys), 0)
        self._num_added += 1

    def iterate(self, count: int) -> int:
        """Do ``count`` iterations; return the decode rows among them."""
        rows = 0
        for _ in range(count):
            while len(self._plans) <= self._depth:
                self._plans.append(self.scheduler.schedule(0))
            plan = self._plans.pop(0)
            rows += len(plan.decodes)
            for _ in self.scheduler.commit(plan.step, self._outcomes(plan) if plan.filled else (), 0):
                self._add()
        return rows

    @staticmethod
    def _outcomes(plan) -> list[Outcome]:
        silent = {chunk.request for chunk in plan.chunks if not chunk.samples}
        keys: dict[int, list] = {}
        for request, index in plan.filled:
            keys.setdefault(request, []).append((request, index))
        return [Outcome(r, int(r not in silent), None, tuple(own)) for r, own in keys.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=128, help="requests running at once (default 128)")
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions of each case")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    options = parser.parse_args()
    cases = {
        f"depth {depth}, prefix cache {'on' if caching else 'off'}": Load(options.running, depth, caching, 0)
        for caching in (False, True)
        for depth in (0, 1)
    }
    best = dict.fromkeys(cases, 0.0)
    for load in cases.values():
        load.iterate(500)
    for _ in range(options.rounds):
        for name, load in cases.items():
            start = time.process_time()
            rows = load.iterate(options.iterations)
            rate = options.iterations / (time.process_time() - start)
            best[name] = max(best[name], rate)
            print(
                f"{name}: {rate:,.0f} iterations/s of CPU time, {rows / options.iterations:.1f} decodes each"
            )
    print("\nbest: " + "; ".join(f"{name}: {rate:,.0f}" for name, rate in best.items()))
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(next(iter(cases.values())).iterate, 10_000)
        pstats.Stats(profile).sort_stats("tottime").print_stats(16)


if __name__ == "__main__":
    main()
