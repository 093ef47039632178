"""Which call runs where and when: a pure state machine. Events and the time go in, commands come out."""

from callyard.scheduler.batches import prepare_batch
from callyard.scheduler.calls import Call, CallResult, CallState, FunctionTarget, NewCall, StopReason
from callyard.scheduler.config import SchedulerConfig
from callyard.scheduler.core import Scheduler
from callyard.scheduler.tasks import TaskPlan

__all__ = [
    "Call",
    "CallResult",
    "CallState",
    "FunctionTarget",
    "NewCall",
    "Scheduler",
    "SchedulerConfig",
    "StopReason",
    "TaskPlan",
    "prepare_batch",
]
