"""From a request's fields to the engine's sampling parameters, and to how the answer is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedserve.engine.params import SamplingParams, check_token_ids
from pagedserve.engine.server.backend import BackendFacts, SubmitOptions
from pagedserve.engine.server.errors import ApiError, bad_request
from pagedserve.engine.server.forms import form_of, told_of
from pagedserve.engine.server.schema import MAX_BIASES, ChatRequest, CompletionRequest, GenerationRequest
from pagedserve.engine.server.settings import ServerSettings
from pagedserve.engine.server.unsupported import refuse_extras
from pagedserve.policy import Request, RequestRefused

DEFAULT_COMPLETION_TOKENS = 16
_NAMES = ("temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "ignore_eos")
_NAMES += (
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "logit_bias",
    "allowed_token_ids",
)
_NAMES += ("repetition_penalty", "presence_penalty", "frequency_penalty")
_TOLD = (*_NAMES, "max_tokens", "logprobs", "prompt_logprobs", "structured_outputs")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for, apart from its prompts. ``max_tokens`` None: as many as there is room for.

    ``echoes_only``: the prompt and nothing else (``echo`` with ``max_tokens`` 0); the one token that has to be
    computed is not told. ``num_prompt_logprobs``: told in vLLM's form, None for not at all.
    """

    fields: dict[str, Any]
    max_tokens: int | None
    num_samples: int
    options: SubmitOptions
    is_stream: bool
    includes_usage: bool
    includes_continuous_usage: bool
    echoes_only: bool
    num_prompt_logprobs: int | None
    form_name: str | None
    """The parameter that asks for a form."""
    limit_name: str = "max_tokens"
    """The parameter that bounds the output."""

    def params(self, num_prompt_tokens: int, facts: BackendFacts) -> SamplingParams:
        """Sampling for a prompt of that length. `ApiError` 400 where the limits leave no room for it."""
        room = _room(num_prompt_tokens, facts)
        if self.max_tokens is not None and self.max_tokens > room:
            raise bad_request(
                f"{self.limit_name} is {self.max_tokens} and the prompt has {num_prompt_tokens} tokens; prompt and "
                f"output together may have {facts.limits.max_model_len}: ask for {room} or fewer",
                self.limit_name,
                "context_length_exceeded",
            )
        if self.fields["min_tokens"] > (self.max_tokens or room):
            raise bad_request(
                f"min_tokens is {self.fields['min_tokens']} and the prompt has {num_prompt_tokens} tokens, which "
                f"leave room for {room}: lower the first or shorten the prompt",
                "min_tokens",
            )
        try:
            return SamplingParams(**self.fields, max_tokens=self.max_tokens or room)
        except ValueError as error:
            raise named(error, self.form_name) from error


def _room(num_prompt_tokens: int, facts: BackendFacts) -> int:
    """Output tokens that fit behind a prompt in the model."""
    try:
        facts.limits.output_limit(Request(0, 0, num_prompt_tokens, 1))
    except RequestRefused as error:
        message = str(error).removeprefix("request 0 has ")
        raise bad_request(f"the request has {message}", "prompt", "context_length_exceeded") from error
    return facts.limits.max_model_len - num_prompt_tokens


def wanted(request: GenerationRequest, settings: ServerSettings, facts: BackendFacts) -> Wanted:
    """What the request asks for, checked as far as it can be without its prompts; `ApiError` 400."""
    refuse_extras(request.model_extra, type(request).model_fields)
    given = {name: getattr(request, name) for name in _NAMES}
    fields = {name: value for name, value in given.items() if value is not None}
    fields["logprobs"] = _logprobs(request, settings)
    fields["prompt_logprobs"] = _prompt_logprobs(request, settings, fields["logprobs"])
    form_name, fields["structured_outputs"] = form_of(request) or (None, None)
    if len(request.logit_bias or ()) > MAX_BIASES:
        told = f"logit_bias has {len(request.logit_bias or ())} tokens; give {MAX_BIASES} at most"
        raise bad_request(told, "logit_bias")
    options = request.stream_options
    if options is not None and not request.stream:
        raise bad_request("stream_options are about streams and stream is not true; leave them out")
    num_samples = fields.get("n", 1)
    if not 1 <= num_samples <= settings.max_samples:
        raise bad_request(f"n is {num_samples}; ask for 1 to {settings.max_samples} samples", "n")
    echoes_only = isinstance(request, CompletionRequest) and bool(request.echo) and request.max_tokens == 0
    limit_name, max_tokens = ("max_tokens", 1) if echoes_only else _max_tokens(request)
    try:
        # Everything that does not depend on the prompt.
        probe = SamplingParams(**fields, max_tokens=max_tokens or max(1, fields["min_tokens"]))
        probe.validate_for_vocab(facts.vocab_size)
    except ValueError as error:
        raise named(error, form_name) from error
    includes_usage = options is not None and bool(options.include_usage)
    return Wanted(
        fields=fields,
        max_tokens=max_tokens,
        num_samples=num_samples,
        options=SubmitOptions(request.priority, request.user or "", request.cache_salt),
        is_stream=bool(request.stream),
        includes_usage=includes_usage,
        includes_continuous_usage=includes_usage
        and options is not None
        and bool(options.continuous_usage_stats),
        echoes_only=echoes_only,
        num_prompt_logprobs=request.prompt_logprobs,
        form_name=form_name,
        limit_name=limit_name,
    )


def check_ids(prompts: Sequence[Any], facts: BackendFacts) -> None:
    """Refuse ids that are no tokens of the model; text passes."""
    size = facts.vocab_size
    for index, prompt in enumerate(prompts):
        # The slow check, which says which id it is, only where there is one.
        if not isinstance(prompt, str) and not 0 <= min(prompt, default=0) <= max(prompt, default=0) < size:
            name = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            try:
                check_token_ids(name, prompt, size)
            except ValueError as error:
                raise bad_request(str(error), "prompt") from error


def _max_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    """The parameter that bounds the output, and its value."""
    most, name = request.max_tokens, "max_tokens"
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if most is not None and most != request.max_completion_tokens:
            raise bad_request(
                f"max_completion_tokens is {request.max_completion_tokens} and max_tokens, its old name, is "
                f"{most}; give one of them",
                "max_tokens",
            )
        most, name = request.max_completion_tokens, "max_completion_tokens"
    elif most is None and isinstance(request, CompletionRequest):
        most = DEFAULT_COMPLETION_TOKENS
    if most is not None and most < 1:
        raise bad_request(f"{name} is {most}; ask for at least one token", name)
    if most is not None and request.min_tokens > most:
        told = f"min_tokens is {request.min_tokens}, above {name}, {most}: lower the first or raise the other"
        raise bad_request(told, "min_tokens")
    return name, most


def _logprobs(request: GenerationRequest, settings: ServerSettings) -> int | None:
    """How many top logprobs to report, None for none at all."""
    count, name = getattr(request, "logprobs", None), "logprobs"
    if isinstance(request, ChatRequest):
        name, top = "top_logprobs", request.top_logprobs
        if top is not None and not request.logprobs:
            raise bad_request(f"top_logprobs is {top} and logprobs is not true; set logprobs to true", name)
        count = (top or 0) if request.logprobs else None
    if count is not None and not 0 <= count <= settings.max_logprobs:
        raise bad_request(f"{name} is {count}; ask for 0 to {settings.max_logprobs}", name)
    return count


def _prompt_logprobs(
    request: GenerationRequest, settings: ServerSettings, logprobs: int | None
) -> int | None:
    """How many top logprobs the engine is to report of prompt tokens; an echo with logprobs needs them too."""
    count = request.prompt_logprobs
    if count is not None and not 0 <= count <= settings.max_logprobs:
        raise bad_request(
            f"prompt_logprobs is {count}; ask for 0 to {settings.max_logprobs}", "prompt_logprobs"
        )
    if count is not None and request.stream:
        raise bad_request(
            "prompt_logprobs are told with whole answers only: set stream to false, or use echo with logprobs",
            "prompt_logprobs",
        )
    if isinstance(request, CompletionRequest) and request.echo and logprobs is not None:
        return max(logprobs, count or 0)
    return count


def named(error: ValueError, form_name: str | None = None) -> ApiError:
    """The engine's refusal; its messages begin with the parameter's name. ``form_name``: what a form was asked by."""
    message = str(error) if form_name is None else told_of(form_name, str(error))
    first = message.split(" ", 1)[0].split("[", 1)[0].split(".", 1)[0]
    return bad_request(message, first if first in (*_TOLD, form_name) else None)
