"""Requests whose whole text is known in advance, so that a test can tell what every KV slot must hold."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache

from pagedserve.policy import Limits, Request


@dataclass(frozen=True, slots=True)
class Script:
    """A request and its text: the prompt, and every output token up to ``max_tokens``.

    The first ``shared`` tokens are those of ``family``, the rest are the request's own; so two scripts of a
    family have a common prefix, which may reach into what they generate. The model "says" stop after
    ``stop_after`` output tokens (None: never). The scheduler never sees any of this.
    """

    request: Request
    family: int
    shared: int
    stop_after: int | None

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    @property
    def num_tokens(self) -> int:
        """Length of the text: prompt and all outputs that could be asked for."""
        return self.request.num_prompt_tokens + self.request.max_tokens

    def contents(self) -> tuple[int, ...]:
        """For each position, a number that stands for the text up to there: what its KV depends on."""
        return _contents(self.id, self.family, self.shared, self.num_tokens)

    def num_outputs(self, limits: Limits) -> int:
        """Output tokens of an undisturbed run, by the rule of CASES A4, independent of the scheduler."""
        prompt = self.request.num_prompt_tokens
        room = min(limits.max_model_len - prompt, limits.num_slots - prompt + 1)
        longest = min(self.request.max_tokens, room)
        return longest if self.stop_after is None else min(longest, self.stop_after)

    def reason(self, limits: Limits) -> str:
        """Why an undisturbed run ends."""
        return "stop" if self.num_outputs(limits) == self.stop_after else "length"


@cache
def _contents(request: int, family: int, shared: int, num_tokens: int) -> tuple[int, ...]:
    contents, before = [], 0
    for position in range(num_tokens):
        # Hashes of integers do not depend on PYTHONHASHSEED.
        owner = (0, family) if position < shared else (1, request)
        before = hash((before, position, *owner))
        contents.append(before)
    return tuple(contents)


def block_key(script: Script, index: int, block_size: int) -> Hashable:
    """The key of a full block: stands for all the text to the block's end, as the engine's hash does.

    A string, so that its Python hash differs with PYTHONHASHSEED.
    """
    return f"text {script.contents()[(index + 1) * block_size - 1]}"


def scripted(
    request: int,
    prompt: int,
    max_tokens: int,
    *,
    arrival_ns: int = 0,
    stop_after: int | None = None,
    family: int = 0,
    shared: int = 0,
    block_size: int | None = None,
) -> Script:
    """A script; with ``block_size`` its prompt blocks have keys."""
    bare = Script(Request(request, arrival_ns, prompt, max_tokens), family, shared, stop_after)
    if block_size is None:
        return bare
    keys = [block_key(bare, i, block_size) for i in range(prompt // block_size)]
    return Script(Request(request, arrival_ns, prompt, max_tokens, tuple(keys)), family, shared, stop_after)


def crowd() -> list[Script]:
    """Five requests that a pool of nine blocks does not hold together."""
    return [scripted(i, 3 + i, 8, stop_after=(None, 5)[i % 2], arrival_ns=7 * i) for i in range(5)]
