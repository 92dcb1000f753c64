"""The API's paths that generate, and those about tokens."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response

from pagedserve.engine.outputs import Delta, PromptLogprobs
from pagedserve.engine.server.answer import Answer, ChoiceState, as_json
from pagedserve.engine.server.front import FrontEnd
from pagedserve.engine.server.generation import Generation
from pagedserve.engine.server.logprobs import (
    CompletionLogprobsState,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
)
from pagedserve.engine.server.prompts import PromptCodec
from pagedserve.engine.server.respond import AnswerResponse
from pagedserve.engine.server.sampling import check_ids, wanted
from pagedserve.engine.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChat,
    TokenizeText,
)
from pagedserve.engine.server.unsupported import refuse_extras

router = APIRouter()


def front_of(request: Request) -> FrontEnd:
    """The front end of the app that got the request."""
    return request.app.state.front


class CompletionAnswer(Answer):
    """``/v1/completions``."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, front: FrontEnd, body: CompletionRequest, generation: Generation, asked: Any, model: str
    ) -> None:
        super().__init__(generation, asked, model, body.request_id, len(body.prompt))
        self._body = body
        self._names = TokenNames(front.codec, bool(body.return_tokens_as_token_ids))
        self._logprobs = [CompletionLogprobsState(self._names) for _ in self.choices]

    def _echo(self, choice: ChoiceState, prompt_logprobs: PromptLogprobs | None) -> str:
        """The prompt's text, if it is to be repeated."""
        prompt, state = self.generation.prompts[choice.prompt], self._logprobs[choice.index]
        if self._body.echo and self._body.logprobs is not None and prompt_logprobs is not None:
            state.add_prompt(prompt.ids, prompt_logprobs, prompt.text, self._body.logprobs)
        state.offset = len(prompt.text)
        return prompt.text

    def _told(self, choice: ChoiceState, positions: Any) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        self._logprobs[choice.index].add(positions)
        return self._logprobs[choice.index].take()

    def whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        """See `Answer.whole_choice`."""
        text = self._echo(choice, choice.prompt_logprobs) + "".join(choice.pieces)
        told: dict[str, Any] = {"text": text, "logprobs": self._told(choice, choice.logprobs)}
        num_top = self.wanted.num_prompt_logprobs
        if num_top is not None:
            told["prompt_logprobs"] = prompt_logprobs(self._names, choice.prompt_logprobs, num_top)
        return told

    def chunk_choice(self, choice: ChoiceState, delta: Delta) -> dict[str, Any]:
        """See `Answer.chunk_choice`; the first chunk brings the prompt's text, if asked for."""
        text = delta.text if choice.has_begun else self._echo(choice, delta.prompt_logprobs) + delta.text
        has_logprobs = delta.logprobs or delta.prompt_logprobs
        return {"text": text, "logprobs": self._told(choice, delta.logprobs) if has_logprobs else None}


class ChatAnswer(Answer):
    """``/v1/chat/completions``. The role comes with the first token, so that every chunk but the last has one."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, front: FrontEnd, body: ChatRequest, generation: Generation, asked: Any, model: str
    ) -> None:
        super().__init__(generation, asked, model, body.request_id, 1)
        self._names = TokenNames(front.codec, bool(body.return_tokens_as_token_ids))
        self._has_logprobs = bool(body.logprobs)

    def _told(self, positions: Any) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        return {"content": chat_logprobs(self._names, positions), "refusal": None}

    def whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        """See `Answer.whole_choice`."""
        message = {"role": "assistant", "content": "".join(choice.pieces), "refusal": None}
        return {"message": message, "logprobs": self._told(choice.logprobs)}

    def whole_extra(self) -> dict[str, Any]:
        """See `Answer.whole_extra`."""
        num_top = self.wanted.num_prompt_logprobs
        if num_top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._names, self.choices[0].prompt_logprobs, num_top)}

    def chunk_choice(self, choice: ChoiceState, delta: Delta) -> dict[str, Any]:
        """See `Answer.chunk_choice`."""
        role = {} if choice.has_begun else {"role": "assistant"}
        content = {"content": delta.text} if delta.text or delta.token_ids else {}
        logprobs = self._told(delta.logprobs) if delta.logprobs else None
        return {"delta": {**role, **content}, "logprobs": logprobs}


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    arrival_ns, front = time.monotonic_ns(), front_of(request)
    front.check_open()
    model, asked = front.check_model(body.model), wanted(body, front.settings, front.backend.facts)
    check_ids(body.prompt, front.backend.facts)
    how = body.add_special_tokens, bool(body.echo), body.skip_special_tokens
    encoders = [partial(front.codec.prompt, prompt, *how) for prompt in body.prompt]
    generation = Generation(front, asked, encoders, arrival_ns)
    return AnswerResponse(CompletionAnswer(front, body, generation, asked, model))


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Continue a conversation."""
    arrival_ns, front = time.monotonic_ns(), front_of(request)
    front.check_open()
    model, asked = front.check_model(body.model), wanted(body, front.settings, front.backend.facts)
    generation = Generation(front, asked, [partial(front.codec.chat, body)], arrival_ns)
    return AnswerResponse(ChatAnswer(front, body, generation, asked, model))


@router.post("/tokenize")
async def tokenize(
    body: Annotated[TokenizeText | TokenizeChat, Body(union_mode="left_to_right")], request: Request
) -> Response:
    """Token ids of a text or a chat."""
    front = front_of(request)
    front.check_open()
    front.check_model(body.model)
    refuse_extras(body.model_extra, type(body).model_fields)
    ticket = front.admission.enter(1)
    try:
        told = await front.codec.run(_tokenized, front.codec, body)
    finally:
        ticket.leave()
    limit = {"max_model_len": front.backend.facts.limits.max_model_len}
    return Response(as_json({**told, **limit}), media_type="application/json")


def _tokenized(codec: PromptCodec, body: TokenizeText | TokenizeChat) -> dict[str, Any]:
    if isinstance(body, TokenizeChat):
        ids = codec.chat(body).ids
    else:
        ids = codec.encode(body.prompt, body.add_special_tokens)
    strs = codec.tokens(ids) if body.return_token_strs else None
    return {"count": len(ids), "tokens": ids, "token_strs": strs}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    front = front_of(request)
    front.check_open()
    front.check_model(body.model)
    refuse_extras(body.model_extra, type(body).model_fields)
    check_ids([body.tokens], front.backend.facts)
    ticket = front.admission.enter(1)
    try:
        text = await front.codec.run(front.codec.decode, body.tokens)
    finally:
        ticket.leave()
    return Response(as_json({"prompt": text}), media_type="application/json")
