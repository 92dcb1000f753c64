"""The primary comparison: batching policies on the same engine, model, precision, prompts and outputs.

Every policy serves the same requests live, all waiting from the start (throughput) and arriving over time
(latency), in turns. Throughput stands beside TTFT, inter-token latency, request latency, occupancy, waste and
concurrency, as medians over the rounds.

    python benchmarks/policies_live.py --trace conv.csv --requests 60 --rounds 3
"""

import argparse
import math

import pandas as pd
from rich.console import Console
from rich.progress import track

from pagedserve.engine.heap import settle_heap
from pagedserve.engine.llm import LLM
from pagedserve.metrics.compare import as_shown, policy_table
from pagedserve.policy import policy
from pagedserve.traces.sample_files import named_trace
from pagedserve.traces.transforms import first, scale_lengths
from pagedserve.validation.planning import Setting, at_rate
from pagedserve.validation.validate import LiveBench


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--trace", default="sample:azure_shaped_500")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--length-scale", type=float, default=0.1)
    parser.add_argument("--rates", type=float, nargs="+", default=[math.inf, 2.0], help="requests/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=["serial", "static", "prefill_first", "mixed"])
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    return parser.parse_args()


def main() -> None:
    """Live runs in turns, then the tables."""
    options = parsed()
    llm = LLM(
        options.model,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=2048,
    )
    settle_heap()
    bench = LiveBench(llm.engine)
    bench.warm_up()
    trace = named_trace(options.trace)
    trace = scale_lengths(first(trace, options.requests), options.length_scale)
    print(
        f"{len(trace)} requests: prompts {trace.num_prompt_tokens.sum()}, outputs {trace.num_output_tokens.sum()}"
    )
    runs = [
        (number, rate, name)
        for number in range(options.rounds)
        for rate in options.rates
        for name in options.policies
    ]
    tables: dict[float, list[pd.DataFrame]] = {rate: [] for rate in options.rates}
    for _, rate, name in track(runs, "live runs", console=Console(stderr=True)):
        record = bench.replay(at_rate(trace, rate), Setting(policy(name), llm.engine.limits))
        tables[rate].append(policy_table({name: record}))
    llm.close()
    show(tables, options)


def show(tables: dict[float, list[pd.DataFrame]], options: argparse.Namespace) -> None:
    """For each rate the medians over the rounds, and throughput against the first policy's."""
    for rate, found in tables.items():
        middle = pd.concat(found).groupby(level=0, sort=False).median()
        print(
            f"\n{'all at once' if math.isinf(rate) else f'{rate:g} requests/s'}, median of {options.rounds}"
        )
        print(as_shown(middle).to_string())
        base = middle.loc[options.policies[0], "output_tokens_per_s"]
        print((middle["output_tokens_per_s"] / base).round(2).to_string())


if __name__ == "__main__":
    main()
