"""Requests as they come: names, types and defaults of OpenAI's API, and of vLLM's extensions to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from pagedserve.engine.server.errors import shown

Text = Annotated[str, Field(max_length=256)]
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
INT32 = 2**31
PromptShape = str | list[str] | list[int] | list[list[int]]
Prompt = str | list[int]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


def _prompts(value: Any) -> list[Prompt]:
    """One prompt or many, each text or ids."""
    if isinstance(value, str) or _is_ids(value):
        return [_text(value) if isinstance(value, str) else value]
    if isinstance(value, list) and not value:
        raise ValueError("prompt is an empty list; give text, token ids, or a list of either")
    if not isinstance(value, list):
        raise ValueError(f"prompt is {shown(value)}; give text, token ids, or a list of either")
    kinds = {str if isinstance(item, str) else list if _is_ids(item) else None for item in value}
    if kinds == {str}:
        return [_text(item) for item in value]
    if kinds == {list}:
        return value
    index, item = next(
        ((i, item) for i, item in enumerate(value) if not isinstance(item, str) and not _is_ids(item)),
        (0, value[0]),
    )
    raise ValueError(
        f"prompt[{index}] is {shown(item)}; give text, token ids, or a list of one kind of them, none empty"
    )


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start}; it stands for no text") from None
    return value


def _stops(value: Any) -> tuple[str, ...]:
    """Stop strings; what they cost is paid for every character of output, hence the limits."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"stop is {shown(value)}; give a text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"stop has {len(stops)} texts; give {MAX_STOPS} at most")
    for index, stop in enumerate(stops):
        if not stop:
            raise ValueError(f"stop[{index}] is empty; it would end every output at once: leave it out")
        if len(stop) > MAX_STOP_CHARS:
            raise ValueError(f"stop[{index}] has {len(stop)} characters; give {MAX_STOP_CHARS} at most")
    return tuple(map(_text, stops))


class _Request(BaseModel):
    """Fields nobody knows stay in ``model_extra``, to be refused by name."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(BaseModel):
    """What a stream says beside its text; options that are unknown here are let be."""

    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(BaseModel):
    """A named schema of ``response_format``; all of it that can be kept is kept, ``strict`` or not."""

    model_config = ConfigDict(strict=True, extra="forbid")
    name: Text
    description: str | None = None
    form: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's way to ask for a form."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredForm(BaseModel):
    """vLLM's way: exactly one of these."""

    model_config = ConfigDict(strict=True, extra="forbid")
    schema_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GenerationRequest(_Request):
    """What completions and chat share."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = 1
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = 0.0
    repetition_penalty: float | None = 1.0
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredForm | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    seed: int | None = None
    stop: Annotated[
        tuple[str, ...], PlainValidator(_stops, json_schema_input_type=str | list[str] | None)
    ] = ()
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: Text | None = None
    """The tenant, for policies that share fairly."""
    priority: Annotated[int, Field(ge=-INT32, lt=INT32)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    return_tokens_as_token_ids: bool | None = False


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts, json_schema_input_type=PromptShape)]
    logprobs: int | None = None
    echo: bool | None = False
    add_special_tokens: bool = True


class Message(BaseModel):
    """One message of a chat; fields beyond these are the chat template's business."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Text
    content: str | list[dict[str, Any]] | None = None


class ChatOptions(_Request):
    """How messages become a prompt."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(GenerationRequest, ChatOptions):
    """The body of ``POST /v1/chat/completions``."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None


class TokenizeText(_Request):
    """The body of ``POST /tokenize`` for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChat(ChatOptions):
    """The body of ``POST /tokenize`` for a chat."""

    model: str | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(_Request):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
