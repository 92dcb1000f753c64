"""Errors of the policy core. Each message names the values, the limit and what to do."""


class RequestRefused(ValueError):
    """A request that can never run, refused by ``Scheduler.add`` before it holds anything."""


class EmptyPrompt(RequestRefused):
    """The prompt has no token."""


class InvalidLimit(RequestRefused):
    """``max_tokens`` is below one, or the prefix keys do not match the prompt."""


class PromptExceedsModel(RequestRefused):
    """The prompt leaves no room for one output token within ``max_model_len``."""


class PromptExceedsPool(RequestRefused):
    """The prompt needs more KV blocks than the whole pool has."""


class QueueFull(RequestRefused):
    """``max_num_queued_reqs`` requests are waiting already."""


class DuplicateRequest(RequestRefused):
    """A live request has the same id."""


class IllegalMove(RuntimeError):
    """A request was moved between two statuses that no rule connects."""


class IllegalPlan(RuntimeError):
    """A policy component made a choice that breaks a budget, a limit or block ownership."""
