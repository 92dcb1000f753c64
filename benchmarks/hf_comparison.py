"""PagedServe against `transformers` generate as a static batch: same model, dtype, prompts and output length.

Runs are interleaved in one process, so that a shared machine's noise falls on both. Prompts are random ids;
every output has exactly ``--output`` tokens. What is compared is output tokens/s of the whole batch; the
table also has what our engine knows of TTFT, inter-token latency, occupancy and waste, policy by policy.

    python benchmarks/hf_comparison.py --model smollm2-135m --requests 32 --prompt 128 --output 128
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from pagedserve.engine.heap import settle_heap
from pagedserve.engine.llm import LLM
from pagedserve.engine.model.files import resolve_model
from pagedserve.engine.model.load import LoadedModel, load_model
from pagedserve.engine.params import SamplingParams
from pagedserve.metrics.compare import as_shown, policy_table
from pagedserve.metrics.record import RunRecord

PEER = "transformers generate"


def hf_model(name: str, dtype: torch.dtype) -> Any:
    """The peer with plain weights: a packed GGUF would be unpacked at every product."""
    files = resolve_model(name)
    if files.kind != "gguf":
        return AutoModelForCausalLM.from_pretrained(str(files.path), dtype=dtype).eval()
    plain = GgufConfig(dequantize=True)
    folder, file = str(files.path.parent), files.path.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=dtype, quantization_config=plain
    )
    return model.to(dtype).eval()


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts as ids, all of one length, and how many tokens follow each."""

    prompts: list[list[int]]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Output tokens of the whole batch."""
        return len(self.prompts) * self.num_output_tokens


def ours(
    loaded: LoadedModel, workload: Workload, policy: str, options: argparse.Namespace
) -> tuple[float, RunRecord]:
    """Output tokens/s under a policy, and the run's record."""
    llm = LLM(
        loaded,
        policy=policy,
        max_num_seqs=options.requests,
        max_model_len=options.prompt + options.output,
        max_num_batched_tokens=options.max_num_batched_tokens,
        overlap_depth=options.overlap_depth,
    )
    params = SamplingParams(temperature=0.0, max_tokens=workload.num_output_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(workload.prompts, params)
    rate = workload.num_tokens / (time.perf_counter() - start)
    assert all(len(group[0].token_ids) == workload.num_output_tokens for group in outputs)
    return rate, llm.record()


def theirs(peer: Any, workload: Workload) -> float:
    """Output tokens/s of `transformers` generate."""
    ids = torch.tensor(workload.prompts)
    start = time.perf_counter()
    with torch.inference_mode():
        out = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=workload.num_output_tokens,
            min_new_tokens=workload.num_output_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    assert out.shape[1] == ids.shape[1] + workload.num_output_tokens
    return workload.num_tokens / (time.perf_counter() - start)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of each request")
    parser.add_argument("--output", type=int, default=128, help="output tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=["vllm_v1", "prefill_first", "static", "serial"])
    parser.add_argument("--overlap-depth", type=int, default=0, choices=[0, 1])
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    return parser.parse_args()


def main() -> None:
    """Interleaved rounds, then the table."""
    options = parsed()
    loaded = load_model(options.model, dtype=options.dtype)
    peer = hf_model(options.model, loaded.model.dtype)
    rng, vocab = np.random.default_rng(0), loaded.model.config.vocab_size
    prompts = rng.integers(100, vocab - 100, (options.requests, options.prompt)).tolist()
    workload = Workload(prompts, options.output)
    settle_heap()
    rates: dict[str, list[float]] = {PEER: [], **{name: [] for name in options.policies}}
    records: dict[str, RunRecord] = {}
    for round_number in range(options.rounds):
        rates[PEER].append(theirs(peer, workload))
        for policy in options.policies:
            if policy == "serial" and round_number:
                continue
            rate, records[policy] = ours(loaded, workload, policy, options)
            rates[policy].append(rate)
        print({name: [round(rate, 1) for rate in own] for name, own in rates.items()}, flush=True)
    base = statistics.median(rates[PEER])
    for name, own in rates.items():
        middle = statistics.median(own)
        print(f"{name:24} {middle:8.1f} output tokens/s  {middle / base:5.2f} x")
    print(as_shown(policy_table(records)).to_string())
    print(f"{loaded.model.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()
