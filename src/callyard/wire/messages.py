"""Every message of the worker-executor protocol, with every payload field.

The envelope is `{message_type, call_id?, request_id?, payload}`; `message_type` is the Struct's tag. Unknown
fields are ignored. `Raw` fields (arguments, outputs, results) travel as the bytes they came in. Instants are
CLOCK_MONOTONIC milliseconds. `attempt_seq` is on every frame of a call, in both directions.
Source: call-execution X49, X78, X93, X94.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from callyard.errors import ErrorKind, Outcome
from callyard.ids import CallId, CallNumber, Digest, ExecutorId, FunctionId, RequestId, TaskId, Tenant

PROTOCOL_VERSION: Final = 2
EXECUTE_CALLS_MAX: Final = 64
"""Most calls in one ExecuteCalls (X94)."""
RECALLED: Final = "recalled"
"""The `error_kind` that answers a recall of a call that had not begun (X93)."""
CODE_PART: Final = "code-part-"
"""The beginning of the request id of a ResumeCall that carries a part of a bundle as its sidecar."""
NULL: Final = Raw(b"null")
EMPTY: Final = Raw(b"{}")

_NATURAL: Final = Meta(ge=0, le=2**63 - 1)
Natural = Annotated[int, _NATURAL]
"""Every number on the wire: an executor that could send a negative one could hand itself budget (X65)."""


class WaitKind(StrEnum):
    IO = "io"
    SUBCALL = "subcall"
    FUNCTION_CODE = "function_code"


class CancelReason(StrEnum):
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    SHUTTING_DOWN = "shutting_down"
    RECALL = "recall"


class CallEventKind(StrEnum):
    PROGRESS = "progress"
    LOG = "log"
    OUTPUT = "output"


class _Payload(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Payload fields at their defaults are left out. Subclasses repeat `frozen` for type checkers."""


class _Message(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag_field="message_type", tag=str):
    """One frame's envelope."""


# --- both ways ---------------------------------------------------------------------------------


class Stored(_Payload, frozen=True):
    """Where in the arena a value lies that is too large for a frame (X95). Its field in the message is then null."""

    grant: Natural
    offset: Natural
    length: Natural


class ArenaReleasedPayload(_Payload, frozen=True):
    grants: list[Natural]


class ArenaReleased(_Message, frozen=True, tag="ArenaReleased"):
    """These values were copied out of the arena: their places may be used again."""

    payload: ArenaReleasedPayload


# --- worker -> executor ------------------------------------------------------------------------


class CallContext(_Payload, frozen=True):
    """What a running call may know of itself (X78)."""

    trace: dict[str, str] = {}
    tags: dict[str, str] = {}
    owner: str = ""
    tenant: Tenant = Tenant("default")
    idempotency_key: str = ""
    attempt: Natural = 1
    deadline_remaining_ms: Natural | None = None
    call_id: CallId = CallId("")
    """What whoever asked for it calls the call; empty: as the frame does."""
    claims: dict[str, str] = {}
    """What the caller's token says of the caller."""
    headers: dict[str, str] = {}
    """Those of the request that the server hands on."""
    meta: Raw = EMPTY
    """A JSON object: what the request said of itself, the part that the server hands on."""


class Promises(_Payload, frozen=True):
    """The promises that the executor needs while it runs a call."""

    idempotent: bool = False
    exclusive: bool = False
    preempt: bool = False


class ResultForm(_Payload, frozen=True):
    """What the result of a call is to be."""

    binary: bool = False
    """JSON beside binary parts (`wire.values`) is welcome; else it is all JSON."""
    nan_null: bool = False
    """NaN and infinities are null; else they are the call's failure, unless the function says so itself."""
    bytes_max: Natural = 0
    """Most bytes, where the function names no maximum of its own; 0: no limit but the arena's."""


JSON_FORM: Final = ResultForm()


class ExecuteCallPayload(_Payload, frozen=True):
    task_id: TaskId
    function_id: FunctionId
    function_code_digest: Digest
    attempt_seq: Natural
    args: Raw
    """The JSON arguments as sent: an array (positional), an object (keywords), or a row when `row` is set."""
    call_number: Annotated[CallNumber, _NATURAL] = CallNumber(0)
    """What the executor writes to the begun-mark page (X62)."""
    row: bool = False
    """`args` is a row of a call list: an object, or a whole row for a function with one object parameter."""
    strings: bool = False
    """The values in `args` are text to be parsed by each parameter's type (CSV cells, `key=value`)."""
    entry_selector: str = ""
    """`module:qualified.name` inside the bundle."""
    parent_call_id: CallId = CallId("")
    call_budget_ms: Natural = 0
    """Running time allowed, milliseconds; 0: unlimited."""
    audit: str = ""
    promises: Promises = Promises()
    context: CallContext = CallContext()
    events: bool = False
    """Tell what it prints and logs, and its progress, while it runs: CallEvents (X58, X59)."""
    check_only: bool = False
    """Bind the arguments, call nothing, and answer null."""
    result_form: ResultForm = JSON_FORM
    args_at: Stored | None = None


class ExecuteCall(_Message, frozen=True, tag="ExecuteCall"):
    call_id: CallId
    payload: ExecuteCallPayload


class BatchedCall(_Payload, frozen=True):
    """One call of an ExecuteCalls: only what differs from its neighbours."""

    call_id: CallId
    attempt_seq: Natural
    args: Raw
    call_number: Annotated[CallNumber, _NATURAL] = CallNumber(0)
    context: CallContext = CallContext()


class ExecuteCallsPayload(_Payload, frozen=True):
    """Up to `EXECUTE_CALLS_MAX` calls of one idempotent function (X94)."""

    task_id: TaskId
    function_id: FunctionId
    function_code_digest: Digest
    calls: Annotated[list[BatchedCall], Meta(min_length=1, max_length=EXECUTE_CALLS_MAX)]
    row: bool = False
    strings: bool = False
    entry_selector: str = ""
    call_budget_ms: Natural = 0
    audit: str = ""
    promises: Promises = Promises()
    events: bool = False
    check_only: bool = False
    result_form: ResultForm = JSON_FORM


class ExecuteCalls(_Message, frozen=True, tag="ExecuteCalls"):
    payload: ExecuteCallsPayload


class WireError(_Payload, frozen=True):
    """An error inside a ResumeCall or a Described."""

    kind: ErrorKind
    message: str
    retryable: bool = False
    details: dict[str, Any] = {}


class ResumeCallPayload(_Payload, frozen=True):
    resume_kind: WaitKind
    attempt_seq: Natural
    result: Raw = NULL
    error: WireError | None = None
    budget_used_ms: Natural = 0
    result_at: Stored | None = None


class ResumeCall(_Message, frozen=True, tag="ResumeCall"):
    call_id: CallId
    request_id: RequestId
    payload: ResumeCallPayload


class CancelCallPayload(_Payload, frozen=True):
    reason: CancelReason
    attempt_seq: Natural


class CancelCall(_Message, frozen=True, tag="CancelCall"):
    call_id: CallId
    payload: CancelCallPayload


class HeartbeatAckPayload(_Payload, frozen=True):
    heartbeat_seq: Natural = 0


class HeartbeatAck(_Message, frozen=True, tag="HeartbeatAck"):
    payload: HeartbeatAckPayload = HeartbeatAckPayload()


class DescribePayload(_Payload, frozen=True):
    """Load a bundle and say what is in it (D6)."""

    function_code_digest: Digest
    path: str
    """The bundle's folder, as the executor sees it."""
    module: str
    """The dotted name of the target module."""
    only_load: bool = False
    """The answer lists no functions: the code is to be there before calls are."""
    names: list[str] = []
    """Callables of the module that were asked for by name: they are listed whether declared or not."""


class Describe(_Message, frozen=True, tag="Describe"):
    request_id: RequestId
    payload: DescribePayload


# --- executor -> worker ------------------------------------------------------------------------


class IoRequest(_Payload, frozen=True):
    provider: str
    operation: str
    request: Raw = NULL


class SubcallRequest(_Payload, frozen=True):
    function_id: FunctionId
    args: Raw
    ancestry: list[CallId] = []
    granted_budget_ms: Natural = 0
    spread: bool = False
    """May run on another executor of the bundle (X30)."""
    args_at: Stored | None = None


class CodeRequest(_Payload, frozen=True):
    digest: Digest


class CallWaitingPayload(_Payload, frozen=True):
    wait_kind: str
    """A `WaitKind`; anything else is answered with an error, since its call would hang (X78)."""
    task_id: TaskId
    attempt_seq: Natural
    io: IoRequest | None = None
    subcall: SubcallRequest | None = None
    function_code: CodeRequest | None = None


class CallWaiting(_Message, frozen=True, tag="CallWaiting"):
    call_id: CallId
    request_id: RequestId
    payload: CallWaitingPayload


class Timing(_Payload, frozen=True):
    queued_ms: Natural = 0
    run_ms: Natural = 0
    wait_ms: Natural = 0


class CallCompletedPayload(_Payload, frozen=True):
    attempt_seq: Natural
    output: Raw
    task_id: TaskId = TaskId("")
    budget_used_ms: Natural = 0
    timing: Timing | None = None
    notes: list[str] = []
    """What the call changed in its process and was put back, or left behind (X57)."""
    output_at: Stored | None = None
    run_us: Natural = 0
    """How long code of it ran (X91)."""


class CallCompleted(_Message, frozen=True, tag="CallCompleted"):
    call_id: CallId
    payload: CallCompletedPayload


class CallFailedPayload(_Payload, frozen=True):
    attempt_seq: Natural
    error_kind: str
    """An `ErrorKind`, or `recalled` (X93)."""
    error_message: str = ""
    retryable: bool = False
    outcome: Outcome | None = None
    task_id: TaskId = TaskId("")
    error_stack: str = ""
    local_variables: dict[str, str] = {}
    details: dict[str, Any] = {}
    budget_used_ms: Natural = 0
    timing: Timing | None = None
    notes: list[str] = []


class CallFailed(_Message, frozen=True, tag="CallFailed"):
    call_id: CallId
    payload: CallFailedPayload


class SettledCall(_Payload, frozen=True):
    """One end in a CallsSettled: an output, or a failure."""

    call_id: CallId
    attempt_seq: Natural
    output: Raw = NULL
    failure: CallFailedPayload | None = None
    budget_used_ms: Natural = 0
    timing: Timing | None = None


class CallsSettledPayload(_Payload, frozen=True):
    calls: list[SettledCall]
    run_us: Natural = 0
    """How long code of them ran, together (X91)."""


class CallsSettled(_Message, frozen=True, tag="CallsSettled"):
    payload: CallsSettledPayload


class HeartbeatPayload(_Payload, frozen=True):
    executor_id: ExecutorId
    heartbeat_seq: Natural
    runnable_count: Natural = 0
    inflight_count: Natural = 0
    available_contexts: Natural = 0
    memory_bytes: Natural = 0
    """Resident set size."""
    last_scheduler_active_at_ms: Natural = 0
    running_call_id: CallId = CallId("")
    cpu_user_ms: Natural = 0
    cpu_system_ms: Natural = 0
    draining: str = ""
    """Why the process wants to be replaced once its calls are done; empty: it does not."""
    callyard_version: str = ""
    """Only in the first heartbeat, with `protocol`, `python_version` and `token`."""
    protocol: Natural = 0
    python_version: str = ""
    token: str = ""


class Heartbeat(_Message, frozen=True, tag="Heartbeat"):
    payload: HeartbeatPayload


class CallEventPayload(_Payload, frozen=True):
    attempt_seq: Natural
    event_kind: CallEventKind
    task_id: TaskId = TaskId("")
    value: Raw = NULL
    level: str = ""
    text: str = ""
    cut_count: Natural = 0
    """How many bytes just before this one were dropped by the limits (X79)."""


class CallEvent(_Message, frozen=True, tag="CallEvent"):
    call_id: CallId
    payload: CallEventPayload


class DescribedFunction(_Payload, frozen=True):
    """A function as its executor sees it. `name` is unique in the bundle."""

    name: FunctionId
    entry_selector: str
    signature: str
    description: str = ""
    input_schema: Raw = Raw(b"{}")
    output_schema: Raw = Raw(b"{}")
    promises: Raw = Raw(b"{}")
    """The declared promises as JSON: `callyard.functions.Promises`."""
    takes_row: bool = False
    """It has one object parameter, which takes a whole row."""
    is_async: bool = False
    line: Natural = 0
    role: str = "tool"
    """`tool`, `prompt`, `resource`, or `completer`, which suggests values for arguments of the others."""
    title: str = ""
    uri: str = ""
    """Of a resource; with `{name}` in it, of a template."""
    mime_type: str = ""
    completions: Raw = Raw(b"{}")
    """By parameter, as JSON: `callyard.functions.completion.Completion`."""
    own_schema: bool = False
    """`input_schema` is the author's own and is checked as it stands; else it shows the signature."""
    binary: bool = False
    """Its results may hold bytes, arrays or tables."""
    defined: str = ""
    """`module:qualified name` of its definition, in the bundle: the target may have imported it, or renamed it."""


class DescribedPayload(_Payload, frozen=True):
    function_code_digest: Digest
    functions: list[DescribedFunction] = []
    error: WireError | None = None
    installed_packages: list[str] = []
    """Distributions outside the bundle that it imports."""


class Described(_Message, frozen=True, tag="Described"):
    request_id: RequestId
    payload: DescribedPayload


WorkerMessage = ExecuteCall | ExecuteCalls | ResumeCall | CancelCall | HeartbeatAck | Describe | ArenaReleased
ExecutorMessage = (
    CallCompleted | CallsSettled | CallFailed | CallWaiting | Heartbeat | CallEvent | Described | ArenaReleased
)
