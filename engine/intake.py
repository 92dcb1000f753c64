"""From a prompt and its parameters to sequences that can be handed to the policy and the runner."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import index

from pagedserve.engine.detokenize import TokenPieces
from pagedserve.engine.keys import PrefixKeys
from pagedserve.engine.output_text import OutputTextState
from pagedserve.engine.params import SamplingParams, check_token_ids
from pagedserve.engine.sampling.grammar import GrammarCompiler, GrammarState
from pagedserve.engine.sequences import SequenceState
from pagedserve.engine.stops import TokenStops
from pagedserve.policy import Limits, Request


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the engine needs of a tokenizer: ids, bytes of tokens, and what ends an output."""

    size: int
    eos_token_ids: frozenset[int]
    pieces: TokenPieces
    encode: Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What goes with a prompt beside its sampling; see `Engine.submit`."""

    priority: int = 0
    tenant: str = ""
    deadline_ns: int | None = None
    predicted_output_tokens: int | None = None
    cache_salt: str | None = None
    stop_after: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop_after", "predicted_output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, or None")


class Intake:
    """Gives ids, seeds, prefix keys and grammars to prompts; from any thread."""

    def __init__(
        self, vocabulary: Vocabulary, limits: Limits, keys: PrefixKeys | None, seed: int | None
    ) -> None:
        """``keys``: None without a prefix cache. ``seed``: for prompts that bring none; None has one drawn."""
        self.seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        self.vocabulary, self._limits, self._keys = vocabulary, limits, keys
        self._grammars = GrammarCompiler(vocabulary.size, vocabulary.eos_token_ids, vocabulary.pieces)
        self._seeds = random.Random(self.seed)
        self._next_id = 0
        self._lock = threading.Lock()

    def sequences(
        self, prompt: str | Sequence[int], params: SamplingParams, options: RequestOptions, arrival_ns: int
    ) -> list[SequenceState]:
        """One for each of the ``params.n`` samples. ValueError for a prompt or a form that cannot be had."""
        vocabulary = self.vocabulary
        ids = self._token_ids(prompt)
        grammar = self.grammar(params)
        root, keys = self._prompt_keys(ids, params, options.cache_salt)
        first, seed = self._reserve(params)
        request = Request(
            first,
            arrival_ns,
            len(ids),
            params.max_tokens,
            None if keys is None else tuple(keys),
            options.priority,
            options.tenant,
            options.deadline_ns,
            options.predicted_output_tokens,
        )
        self._limits.output_limit(request)
        stops = TokenStops.for_request(params, vocabulary.eos_token_ids)
        return [
            SequenceState(
                replace(request, id=first + sample),
                params,
                list(ids),
                stops,
                OutputTextState(params, vocabulary.pieces, prompt_ids=ids),
                seed,
                sample,
                key_root=root,
                block_keys=list(keys or ()),
                grammar=None if grammar is None else grammar.copy(),
                stop_after=options.stop_after,
            )
            for sample in range(params.n)
        ]

    def grammar(self, params: SamplingParams) -> GrammarState | None:
        """The beginning of the form that is asked for. ValueError if no output has it."""
        if params.structured_outputs is None:
            return None
        found = self._grammars.compile(params.structured_outputs)
        if params.allowed_token_ids is not None and not found.allows_any(params.allowed_token_ids):
            raise ValueError(
                "allowed_token_ids has no token with which an output of structured_outputs' form could begin: "
                "leave one of them out"
            )
        return found

    def _reserve(self, params: SamplingParams) -> tuple[int, int]:
        """The first of ``params.n`` ids, and the seed that all of them have."""
        with self._lock:
            first, self._next_id = self._next_id, self._next_id + params.n
            drawn = self._seeds.randrange(-(1 << 63), 1 << 63) if params.seed is None else params.seed
        return first, drawn

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        is_text = isinstance(prompt, str)
        ids = self.vocabulary.encode(prompt) if is_text else [index(token) for token in prompt]
        check_token_ids("prompt", ids, self.vocabulary.size)
        return ids

    def _prompt_keys(
        self, ids: list[int], params: SamplingParams, cache_salt: str | None
    ) -> tuple[bytes, list[bytes] | None]:
        """The root of the prompt's keys, and those of its full blocks; None where the cache is not used.

        Positions found in the cache have no hidden states, so a prompt whose logprobs are wanted stays out of it.
        """
        if self._keys is None or params.prompt_logprobs is not None:
            return b"", None
        root, keys = self._keys.root(cache_salt), list[bytes]()
        self._keys.extend(keys, root, ids, len(ids) // self._limits.block_size)
        return root, keys
