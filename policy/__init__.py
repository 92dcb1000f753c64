"""The shared brain: scheduling and block-allocation policy.

Standard library only. No clock, no randomness and no ids are made here; all are passed in,
so the engine and the simulator take identical decisions from identical calls.
"""

from pagedserve.policy.errors import IllegalMove, IllegalPlan, RequestRefused
from pagedserve.policy.limits import Limits
from pagedserve.policy.plan import Finished, Outcome, PrefillChunk, StepPlan, StepShape, Swap
from pagedserve.policy.request import Request, RequestState, Status
from pagedserve.policy.scheduler import Scheduler
from pagedserve.policy.spec import Policy, policy, policy_names
from pagedserve.policy.step import Step

__all__ = ["Finished", "IllegalMove", "IllegalPlan", "Limits", "Outcome", "Policy", "PrefillChunk", "Request"]
__all__ += ["RequestRefused", "RequestState", "Scheduler", "Status", "Step", "StepPlan", "StepShape"]
__all__ += ["Swap", "policy", "policy_names"]
