"""The shared brain: scheduling and block-allocation policy.

Standard library only. No clock, no randomness and no ids are made here; all are passed in,
so the engine and the simulator take identical decisions from identical calls.
"""

from pagedserve.policy.errors import (
    DuplicateRequest,
    EmptyPrompt,
    IllegalMove,
    IllegalPlan,
    InvalidLimit,
    PromptExceedsModel,
    PromptExceedsPool,
    QueueFull,
    RequestRefused,
)
from pagedserve.policy.limits import Limits
from pagedserve.policy.plan import Finished, Outcome, PrefillChunk, StepPlan, StepShape
from pagedserve.policy.request import Request, RequestState, Status
from pagedserve.policy.scheduler import Scheduler
from pagedserve.policy.spec import Policy, policy, policy_names

__all__ = [
    "DuplicateRequest",
    "EmptyPrompt",
    "Finished",
    "IllegalMove",
    "IllegalPlan",
    "InvalidLimit",
    "Limits",
    "Outcome",
    "Policy",
    "PrefillChunk",
    "PromptExceedsModel",
    "PromptExceedsPool",
    "QueueFull",
    "Request",
    "RequestRefused",
    "RequestState",
    "Scheduler",
    "Status",
    "StepPlan",
    "StepShape",
    "policy",
    "policy_names",
]
