"""On a GPU a step is put in line and nothing waited for: a dry run on the device that has no values to wait for.

Tensors on torch's meta device have shapes alone, so that whatever reads a value raises: `item`, `tolist`, `bool`,
`nonzero`, a boolean mask, `repeat_interleave`. Two things wait on a GPU and pass there, and are watched for: copies
that do not say that they need not be waited for, and numbers assigned to indices. Attention is a stand-in, as the
kernels that run on a GPU cannot run here; that their wrappers read no values is seen from their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_models import EOS, NUM_TOKENS, greedy, hf_config, prompts, small_limits, vocabulary
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pagedserve.engine.model.config import ModelConfig
from pagedserve.engine.model.model import Model
from pagedserve.engine.model.weights import random_weights
from pagedserve.engine.output_text import OutputTextState
from pagedserve.engine.params import SamplingParams
from pagedserve.engine.runner import ModelRunner
from pagedserve.engine.sampling.grammar import GrammarCompiler
from pagedserve.engine.sequences import SequenceState
from pagedserve.engine.stops import TokenStops
from pagedserve.engine.structured_outputs import StructuredOutputs
from pagedserve.kernels.attention import AttentionSpec
from pagedserve.policy import Request, Scheduler, policy

META = torch.device("meta")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "plain": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.05, "top_k": 9, "top_p": 0.5},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "bias": {"logit_bias": {17: 4.0, 18: -100.0}},
    "allowed": {"allowed_token_ids": [1, 2, 40]},
    "form": {"structured_outputs": StructuredOutputs(regex="[a-f]+")},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": [5, 6]},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
}


class WouldWait(AssertionError):
    """A GPU would be waited for."""


class WatchNumbers(TorchFunctionMode):
    """Raises `WouldWait` for numbers that torch would copy to a GPU: assigned to indices, or made a tensor there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(index, torch.Tensor) for index in indices):
                raise WouldWait(f"{args[2]} is assigned to indices of {tuple(args[0].shape)}")
        if func in (torch.tensor, torch.as_tensor) and (kwargs or {}).get("device") not in (None, "cpu"):
            raise WouldWait(f"a tensor is made of {args[0]} on {(kwargs or {})['device']}")
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Raises `WouldWait` for copies between host and device that do not say that they need not be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            self._copy(name, args, options)
        return func(*args, **options)

    def _copy(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        source = args[0] if name == "_to_copy" else args[1]
        target = options.get("device") or args[0].device
        if source.device == target:
            return
        self.num_copies += 1
        if not (options.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])):
            raise WouldWait(f"{tuple(source.shape)} is copied from {source.device} to {target}")


@dataclass(frozen=True, slots=True)
class NoAttention:
    """The right shapes."""

    spec: AttentionSpec
    name: str = "none"

    def prepare(self, batch: Any, cache: Any) -> None:
        """Nothing to work out."""

    def attend(self, query: torch.Tensor, layer: torch.Tensor, plan: Any, *_: Any, **__: Any) -> torch.Tensor:
        """Nothing either."""
        return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def model_without_values() -> Model:
    config = ModelConfig.from_hf(hf_config("qwen3").to_dict())
    spec = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim)
    return Model(
        config, random_weights(config, 1), dtype=torch.float32, device=META, attention=NoAttention(spec)
    )


def sequence_of(
    number: int, text: tuple[int, ...], params: SamplingParams, forms: GrammarCompiler
) -> SequenceState:
    vocab = vocabulary()
    return SequenceState(
        Request(number, 0, len(text), params.max_tokens),
        params,
        list(text),
        TokenStops.for_request(params, vocab.eos_token_ids),
        OutputTextState(params, vocab.pieces),
        seed=number,
        grammar=None if params.structured_outputs is None else forms.compile(params.structured_outputs),
    )


def steps_of(kinds: list[str], num_steps: int = 4) -> Iterator[Callable[[], object]]:
    """Launch steps of requests of these kinds, prompts in chunks; each is to be computed under a watch."""
    limits = small_limits(max_num_batched_tokens=24, num_blocks=64)
    runner = ModelRunner(model_without_values(), limits, vocabulary().size, False, False)
    scheduler = Scheduler(policy("mixed"), limits)
    forms = GrammarCompiler(NUM_TOKENS, [EOS], vocabulary().pieces)
    for number, (kind, text) in enumerate(zip(kinds, prompts(len(kinds), 5, longest=20), strict=True)):
        sequence = sequence_of(number, text, greedy(9, **KINDS[kind]), forms)
        runner.expect(sequence)
        scheduler.add(sequence.request, number)
    for step in range(num_steps):
        plan = scheduler.schedule(100 + step)
        yield lambda plan=plan: runner.launch(plan)
        yield runner._launched[-1].run
        scheduler.commit(step, (), 100 + step)


@pytest.mark.parametrize("kind", [*KINDS, "all"])
def test_a_step_reads_no_value_and_copies_without_waiting(kind: str) -> None:
    """Chunks, decodes and both, laid out, computed and sampled, with every thing that a request may ask for."""
    kinds = list(KINDS)[:8] if kind == "all" else [kind] * 3
    for work in steps_of(kinds):
        with WatchNumbers(), Watch():
            work()


def test_inputs_are_one_copy() -> None:
    """And one for the noise; what a batch of the same requests shares is sent once."""
    counts = []
    for work in steps_of(["plain"] * 3):
        with Watch() as watch:
            work()
        counts.append(watch.num_copies)
    launches, computations = counts[::2], counts[1::2]
    assert set(computations) == {0}
    assert launches[0] == 3
    assert launches[-1] == 2


MISTAKES: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool((x > 0).any()),
    "nonzero": lambda x: torch.nonzero(x),
    "mask": lambda x: x[x > 0],
    "repeat": lambda x: torch.repeat_interleave(x.long()),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: torch.zeros(3).to(x.device),
    "a list": lambda x: torch.tensor([1, 2], device=x.device),
    "a number": lambda x: x.__setitem__((torch.zeros(2, dtype=torch.int64, device=x.device),), 0.0),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_would_wait_is_seen(mistake: str) -> None:
    with WatchNumbers(), Watch(), pytest.raises((WouldWait, RuntimeError, NotImplementedError)):
        MISTAKES[mistake](torch.empty(4, device=META))
