"""What a dispatch gives: `Ok` or `DispatchError`, which answer the same questions. Source: D7, D22, D43."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, NoReturn, Self, cast

import msgspec

from callyard.errors import KIND_RULES, CallError, CallFailure, ErrorKind, Outcome
from callyard.functions.calling import R_co
from callyard.functions.repairs import Repair
from callyard.ids import CallId

if TYPE_CHECKING:
    from callyard.functions.outgoing import Outgoing


class Ok(msgspec.Struct, Generic[R_co], frozen=True):
    """A call that succeeded."""

    call_id: CallId
    """Of the call that ran; of a joined or stored answer the first run's."""
    output: bytes
    """JSON, as the handler's result was encoded."""
    attempts: int = 1
    deduplicated: bool = False
    """The answer of another call's run, under the same key."""
    enforced: bool = True
    """Its time limit would have stopped the code; a plain `def` in a thread cannot be stopped."""
    repairs: tuple[Repair, ...] = ()
    index: int = 0
    """Its place in a fan-out, from 0."""
    ok: ClassVar[Literal[True]] = True
    """No property: by it type checkers tell the two apart."""

    @property
    def value(self) -> R_co:
        """The JSON value, decoded anew each time: what one caller does to it no other caller sees. Of a dispatch by
        function object: what its annotation says."""
        return cast(R_co, msgspec.json.decode(self.output))

    @property
    def error(self) -> Any:
        """None. Not said in the type: not every type checker takes `if done.ok` for a proof, and such a one would
        refuse `done.error.kind` below it."""
        return None

    def unwrap(self) -> R_co:
        """The value: `value` as a call."""
        return self.value

    def at_index(self, index: int) -> Self:
        """The same, as the one of that place."""
        return msgspec.structs.replace(self, index=index)


class ReadOk(Ok[R_co], frozen=True, kw_only=True):
    """Of a dispatch by function object."""

    returned: Any
    """The output, read as the function's annotation says."""

    @property
    def value(self) -> R_co:
        return cast(R_co, self.returned)


class DispatchError(msgspec.Struct, frozen=True):
    """A call that failed, as a value."""

    call_id: CallId
    failure: CallFailure
    deduplicated: bool = False
    enforced: bool = True
    repairs: tuple[Repair, ...] = ()
    index: int = 0
    """Its place in a fan-out, from 0."""
    ok: ClassVar[Literal[False]] = False

    @property
    def kind(self) -> ErrorKind:
        return self.failure.kind

    @property
    def message(self) -> str:
        return self.failure.message

    @property
    def attempts(self) -> int:
        """Attempts that had begun."""
        return self.failure.attempts

    @property
    def outcome(self) -> Outcome:
        return self.failure.outcome

    @property
    def retryable(self) -> bool:
        """The same call may be made again without harm."""
        return self.failure.retryable

    @property
    def details(self) -> Mapping[str, Any]:
        return self.failure.details

    @property
    def stack(self) -> str:
        """The tool's own traceback."""
        return self.failure.stack

    @property
    def jsonrpc_code(self) -> int:
        return KIND_RULES[self.failure.kind].jsonrpc_code

    @property
    def error(self) -> DispatchError:
        return self

    @property
    def value(self) -> NoReturn:
        """Raises CallError."""
        raise CallError(self.failure)

    def unwrap(self) -> NoReturn:
        """Raises CallError: `value` as a call."""
        raise CallError(self.failure)

    def at_index(self, index: int) -> DispatchError:
        """The same, as the one of that place."""
        return msgspec.structs.replace(self, index=index)

    def to_json(self, *, stack: bool = False, remote: bool = False) -> dict[str, Any]:
        """The envelope that every surface shows. `stack`: with the tool's traceback.

        `remote`: for a caller outside this machine. Of an exception that was not meant for it, it sees the class, and
        the call's id to look it up by: the text may name paths and hosts. Source: tool-dispatch D24.
        """
        failure = _told_remotely(self.failure, self.call_id) if remote else self.failure
        envelope: dict[str, Any] = {
            "kind": failure.kind.value,
            "message": failure.message,
            "attempts": failure.attempts,
            "jsonrpc_code": self.jsonrpc_code,
            "retryable": failure.retryable,
            "outcome": failure.outcome.value,
            "details": dict(failure.details),
            "call_id": self.call_id,
        }
        if self.deduplicated:
            envelope["deduplicated"] = True
        if stack and failure.stack:
            envelope["stack"] = failure.stack
        return envelope


_UNEXPECTED: Final = frozenset({ErrorKind.INTERNAL, ErrorKind.RESOURCE_LIMIT})
"""The kinds whose message may be the text of any exception."""
_CLASS: Final = re.compile(r"[A-Za-z_]\w{0,199}(?=: | \(and \d+ more\)$|$)")
_PLAIN_DETAILS: Final = frozenset({"exit_code", "limit", "exceptions_total"})


def _told_remotely(failure: CallFailure, call_id: CallId) -> CallFailure:
    """What may be said of a failure to those who must not read its text, which is in the log under the same id."""
    failure = msgspec.structs.replace(failure, stack="", local_variables={})
    if failure.kind not in _UNEXPECTED:
        return failure
    named = _CLASS.match(failure.message)
    what = named.group() if named else KIND_RULES[failure.kind].summary
    details = {name: value for name, value in failure.details.items() if name in _PLAIN_DETAILS}
    details["reference"] = call_id
    return msgspec.structs.replace(failure, message=f"{what} (reference {call_id})", details=details)


DispatchResult = Ok[R_co] | DispatchError


def read_as(result: Ok[Any], outgoing: Outgoing) -> DispatchResult[Any]:
    """`result` with the value that its function's annotation says. What is none ran, and its result is lost."""
    try:
        returned = outgoing.decode(result.output)
    except CallError as error:
        failure = msgspec.structs.replace(error.failure, attempts=result.attempts)
        return DispatchError(result.call_id, failure, result.deduplicated, result.enforced, result.repairs)
    fields = {name: getattr(result, name) for name in result.__struct_fields__}
    return ReadOk(**fields, returned=returned)
