"""What serving costs the engine: the same work through the engine alone, and through the HTTP server, in turns.

Both run in this process on one loaded model; only the clients are in a process of their own. "offline" hands
32 prompts to the engine's thread and lets an event loop take the deltas and nothing more; "served" is the whole
server. Compared are the engine's own inter-token times (CPU time of its steps, and waiting for the
interpreter's lock, included), as medians over the rounds.

    python benchmarks/front_end_cost.py --model smollm2-135m --streams 32 --rounds 5
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from multiprocessing import get_context

import numpy as np
import torch
from fastapi import FastAPI
from serve_load import Level, load, requests

from pagedserve.engine.async_engine import AsyncEngine
from pagedserve.engine.heap import settle_heap
from pagedserve.engine.llm import LLM
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.server.app import make_app
from pagedserve.engine.server.backend import ThreadBackend
from pagedserve.engine.server.observer import EngineCountsState
from pagedserve.engine.server.service import bound_socket, serve, url_of
from pagedserve.engine.server.settings import ServerSettings


def ask(url: str, bodies: list[bytes]) -> int:
    """In the clients' process: all at once; the number of tokens that came."""
    replies = asyncio.run(load(url, Level(len(bodies), None, bodies)))
    assert all(reply.error is None for reply in replies), replies[0].error
    return sum(reply.num_tokens for reply in replies)


async def offline(engine: AsyncEngine, prompts: Sequence[list[int]], output: int) -> int:
    """All prompts through the engine, without HTTP."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, min_tokens=output)

    async def one(prompt: list[int]) -> int:
        return sum([len(delta.token_ids) async for delta in engine.stream(prompt, params)])

    return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))


@dataclass(frozen=True, slots=True)
class Sizes:
    """A round's work: that many prompts of so many ids, and so many tokens after each."""

    num_streams: int
    num_prompt_tokens: int
    num_output_tokens: int
    vocab_size: int


async def measure(
    engine: AsyncEngine, app: FastAPI, counts: EngineCountsState, sizes: Sizes, num_rounds: int
) -> dict[str, list[float]]:
    """Seconds a token, by mode and round; a first round, which warms up, is left out."""
    found: dict[str, list[float]] = {"offline": [], "served": []}
    rng, loop = np.random.default_rng(0), asyncio.get_running_loop()
    sock, listens = bound_socket("127.0.0.1", 0), asyncio.Event()
    serving = asyncio.create_task(serve(app, sock, print, listens.set))
    await listens.wait()
    with ProcessPoolExecutor(1, get_context("spawn")) as clients:
        for number in range(num_rounds + 1):
            for mode, own in found.items():
                before, start = (counts.itl.total, counts.itl.count), time.perf_counter()
                if mode == "offline":
                    shape = sizes.num_streams, sizes.num_prompt_tokens
                    prompts = rng.integers(0, sizes.vocab_size, shape).tolist()
                    tokens = await offline(engine, prompts, sizes.num_output_tokens)
                else:
                    bodies = requests("served", *astuple(sizes), seed=number)
                    tokens = await loop.run_in_executor(clients, ask, url_of(sock), bodies)
                assert tokens == sizes.num_streams * sizes.num_output_tokens
                itl_s = (counts.itl.total - before[0]) / (counts.itl.count - before[1])
                took_s = time.perf_counter() - start
                print(f"{mode:8} {1e3 * itl_s:8.3f} ms a token, {took_s:.2f} s in all")
                if number:
                    own.append(itl_s)
    serving.cancel()
    return found


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--overlap-depth", type=int, default=0, choices=[0, 1])
    return parser.parse_args()


def main() -> None:
    """Rounds of both, in turns, and their ratios."""
    options = parsed()
    torch.set_num_threads(options.threads)
    llm = LLM(options.model, max_num_seqs=options.streams, overlap_depth=options.overlap_depth, record=False)
    settle_heap()
    sizes = Sizes(options.streams, options.prompt, options.output, llm.engine.vocabulary.size)
    with AsyncEngine(llm.engine) as engine:
        backend = ThreadBackend(engine, "vllm_v1")
        app = make_app(backend, llm.tokenizer, ServerSettings(("served",)))
        found = asyncio.run(measure(engine, app, backend.stats().counts, sizes, options.rounds))
    middle = {mode: statistics.median(own) for mode, own in found.items()}
    ratios = [served / alone for alone, served in zip(*found.values(), strict=True)]
    print({mode: f"{1e3 * itl_s:.3f} ms" for mode, itl_s in middle.items()})
    print(
        f"served / offline: median {statistics.median(ratios):.3f}, of {[round(each, 3) for each in ratios]}"
    )


if __name__ == "__main__":
    main()
