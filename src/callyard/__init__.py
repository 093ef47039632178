"""Callyard: function calls, admitted when there is room, sorted fairly, run on isolated Python executors.

User files import `function` and the SDK's calls from here, so nothing heavy is imported before it is asked for.
"""

from typing import TYPE_CHECKING, Any

from callyard.errors import CallError, CallFailure, ErrorKind, Outcome, ToolError, TransientError, UsageError
from callyard.functions.function import Function, Promises, function
from callyard.sdk import context, sleep

if TYPE_CHECKING:
    from callyard.functions.registry import Registry
    from callyard.worker.config import WorkerConfig
    from callyard.worker.results import Result, RunSummary
    from callyard.worker.worker import Worker
    from callyard.yard import Yard, run

__version__ = "0.1.0"

__all__ = [
    "CallError",
    "CallFailure",
    "ErrorKind",
    "Function",
    "Outcome",
    "Promises",
    "Registry",
    "Result",
    "RunSummary",
    "ToolError",
    "TransientError",
    "UsageError",
    "Worker",
    "WorkerConfig",
    "Yard",
    "context",
    "function",
    "run",
    "sleep",
]

_LAZY = {
    "Registry": "callyard.functions.registry",
    "Result": "callyard.worker.results",
    "RunSummary": "callyard.worker.results",
    "Worker": "callyard.worker.worker",
    "WorkerConfig": "callyard.worker.config",
    "Yard": "callyard.yard",
    "run": "callyard.yard",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'callyard' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
