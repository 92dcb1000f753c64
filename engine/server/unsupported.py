"""Parameters of OpenAI's and vLLM's that are refused, unless they ask for nothing; and names nobody knows."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pagedserve.engine.server.errors import ApiError, bad_request, shown

# Values that change nothing, null aside: a client that always sends them is served.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "best_of": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "repetition_detection": (),
    "structural_tag": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "return_token_ids": (False,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
}
# Hints about caches and identities, which any server may do nothing about.
_HINTS = frozenset({"prompt_cache_key", "prompt_cache_retention", "safety_identifier"})


def refuse_extras(extras: Mapping[str, Any] | None, known: Mapping[str, Any]) -> None:
    """Of the fields beyond the ``known`` ones, raise `ApiError` for the first that asks for something."""
    for name, value in (extras or {}).items():
        if name in _HINTS:
            continue
        if name not in _NEUTRAL:
            raise _unknown(name, known)
        if value is not None and not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
            raise _refusal(name, value)


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _refusal(name: str, value: Any) -> ApiError:
    neutral = _NEUTRAL[name]
    instead = f", or give {' or '.join(map(repr, neutral))}, which asks for nothing" if neutral else ""
    return bad_request(
        f"{name} is {shown(value)}; this server does not have {name}: leave it out{instead}",
        name,
        "unsupported_parameter",
    )


def _unknown(name: str, known: Mapping[str, Any]) -> ApiError:
    near = get_close_matches(name[:64], [*known, *_NEUTRAL], 1)
    hint = f"did you mean {near[0]}?" if near else "leave it out"
    return bad_request(f"{shown(name)} is no parameter here; {hint}", name[:64], "unknown_parameter")
