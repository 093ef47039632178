"""Callyard: function calls, admitted when there is room, sorted fairly, run on isolated Python executors.

User files import `function` and the SDK's calls from here, so nothing heavy is imported before it is asked for.
"""

from typing import TYPE_CHECKING, Any

from callyard.errors import CallError, CallFailure, ErrorKind, Outcome, ToolError, TransientError, UsageError
from callyard.functions.function import Function, Promises, function
from callyard.functions.roles import prompt, resource
from callyard.sdk import Answer, acall, acall_many, call, call_many, context, log, progress, sleep

if TYPE_CHECKING:
    from callyard.dispatch.allowance import Allowance
    from callyard.dispatch.config import DispatcherConfig
    from callyard.dispatch.dispatcher import Dispatcher
    from callyard.dispatch.fan_out import ToolCall
    from callyard.dispatch.keys import derive_key
    from callyard.dispatch.loop_event import loop_event
    from callyard.dispatch.outcomes import DispatchError, Ok
    from callyard.dispatch.policies import Allow, Deny, allow_tools
    from callyard.functions.audit.policies import AstPolicy, BundleView
    from callyard.functions.audit.verdict import Verdict
    from callyard.functions.calling import BoundCall, bind
    from callyard.functions.contents import Audio, File, Image, Message, ResourceLink
    from callyard.functions.json_schema import normalize_schema
    from callyard.functions.shared import Shared
    from callyard.futures.errors import ExecutorCrashed
    from callyard.futures.pool_executor import PoolExecutor
    from callyard.futures.raised import RemoteError
    from callyard.host.config import HostConfig
    from callyard.host.errors import HostError, HostErrorKind
    from callyard.host.host import Host, SpotTurn
    from callyard.mcp_tools import add_mcp_tools
    from callyard.policy.breaker import BreakerPolicy
    from callyard.policy.retry import RetryPolicy
    from callyard.sdk_client import Elicited, Sampled, aelicit, alist_roots, asample, elicit, list_roots, sample
    from callyard.sdk_io import files, http, jsonrpc, sql
    from callyard.worker.audit_gate import AuditRefused
    from callyard.worker.completing import as_completed
    from callyard.worker.config import PoolConfig, WorkerConfig
    from callyard.worker.io.config import IoConfig
    from callyard.worker.loading import Registry
    from callyard.worker.results import CallEvent, Result, RunSummary
    from callyard.worker.worker import Worker
    from callyard.yard import SyncYard, Yard, run

__version__ = "0.1.0"

__all__ = [
    "Allow",
    "Allowance",
    "Answer",
    "AstPolicy",
    "Audio",
    "AuditRefused",
    "BoundCall",
    "BreakerPolicy",
    "BundleView",
    "CallError",
    "CallEvent",
    "CallFailure",
    "Deny",
    "DispatchError",
    "Dispatcher",
    "DispatcherConfig",
    "Elicited",
    "ErrorKind",
    "ExecutorCrashed",
    "File",
    "Function",
    "Host",
    "HostConfig",
    "HostError",
    "HostErrorKind",
    "Image",
    "IoConfig",
    "Message",
    "Ok",
    "Outcome",
    "PoolConfig",
    "PoolExecutor",
    "Promises",
    "Registry",
    "RemoteError",
    "ResourceLink",
    "Result",
    "RetryPolicy",
    "RunSummary",
    "Sampled",
    "Shared",
    "SpotTurn",
    "SyncYard",
    "ToolCall",
    "ToolError",
    "TransientError",
    "UsageError",
    "Verdict",
    "Worker",
    "WorkerConfig",
    "Yard",
    "acall",
    "acall_many",
    "add_mcp_tools",
    "aelicit",
    "alist_roots",
    "allow_tools",
    "as_completed",
    "asample",
    "bind",
    "call",
    "call_many",
    "context",
    "derive_key",
    "elicit",
    "files",
    "function",
    "http",
    "jsonrpc",
    "list_roots",
    "log",
    "loop_event",
    "normalize_schema",
    "progress",
    "prompt",
    "resource",
    "run",
    "sample",
    "sleep",
    "sql",
]

_LAZY = {
    "Allow": "callyard.dispatch.policies",
    "Allowance": "callyard.dispatch.allowance",
    "AstPolicy": "callyard.functions.audit.policies",
    "Audio": "callyard.functions.contents",
    "AuditRefused": "callyard.worker.audit_gate",
    "BoundCall": "callyard.functions.calling",
    "BreakerPolicy": "callyard.policy.breaker",
    "BundleView": "callyard.functions.audit.policies",
    "CallEvent": "callyard.worker.results",
    "Deny": "callyard.dispatch.policies",
    "DispatchError": "callyard.dispatch.outcomes",
    "Dispatcher": "callyard.dispatch.dispatcher",
    "DispatcherConfig": "callyard.dispatch.config",
    "Elicited": "callyard.sdk_client",
    "ExecutorCrashed": "callyard.futures.errors",
    "File": "callyard.functions.contents",
    "Host": "callyard.host.host",
    "HostConfig": "callyard.host.config",
    "HostError": "callyard.host.errors",
    "HostErrorKind": "callyard.host.errors",
    "Image": "callyard.functions.contents",
    "IoConfig": "callyard.worker.io.config",
    "Message": "callyard.functions.contents",
    "Ok": "callyard.dispatch.outcomes",
    "PoolConfig": "callyard.worker.config",
    "PoolExecutor": "callyard.futures.pool_executor",
    "Registry": "callyard.worker.loading",
    "RemoteError": "callyard.futures.raised",
    "ResourceLink": "callyard.functions.contents",
    "Result": "callyard.worker.results",
    "RetryPolicy": "callyard.policy.retry",
    "RunSummary": "callyard.worker.results",
    "Sampled": "callyard.sdk_client",
    "Shared": "callyard.functions.shared",
    "SpotTurn": "callyard.host.host",
    "SyncYard": "callyard.yard",
    "ToolCall": "callyard.dispatch.fan_out",
    "Verdict": "callyard.functions.audit.verdict",
    "Worker": "callyard.worker.worker",
    "WorkerConfig": "callyard.worker.config",
    "Yard": "callyard.yard",
    "add_mcp_tools": "callyard.mcp_tools",
    "aelicit": "callyard.sdk_client",
    "alist_roots": "callyard.sdk_client",
    "allow_tools": "callyard.dispatch.policies",
    "as_completed": "callyard.worker.completing",
    "asample": "callyard.sdk_client",
    "bind": "callyard.functions.calling",
    "derive_key": "callyard.dispatch.keys",
    "elicit": "callyard.sdk_client",
    "files": "callyard.sdk_io",
    "http": "callyard.sdk_io",
    "jsonrpc": "callyard.sdk_io",
    "list_roots": "callyard.sdk_client",
    "loop_event": "callyard.dispatch.loop_event",
    "normalize_schema": "callyard.functions.json_schema",
    "run": "callyard.yard",
    "sample": "callyard.sdk_client",
    "sql": "callyard.sdk_io",
}


_NEED_EXECUTORS = ("callyard.worker.worker", "callyard.yard", "callyard.futures.pool_executor")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'callyard' has no attribute {name!r}")
    from importlib import import_module

    if _LAZY[name] in _NEED_EXECUTORS:
        from callyard.system import check_system

        check_system()
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
