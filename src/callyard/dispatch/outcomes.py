"""What a dispatch gives: `Ok` or `DispatchError`, which answer the same questions. Source: D7, D22, D43."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, NoReturn

import msgspec

from callyard.errors import KIND_RULES, CallError, CallFailure, ErrorKind, Outcome
from callyard.functions.repairs import Repair
from callyard.ids import CallId


class Ok(msgspec.Struct, frozen=True):
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

    @property
    def ok(self) -> Literal[True]:
        return True

    @property
    def value(self) -> Any:
        """The JSON value, decoded anew each time: what one caller does to it no other caller sees."""
        return msgspec.json.decode(self.output)

    @property
    def error(self) -> None:
        return None

    def unwrap(self) -> Any:
        """The value: `value` as a call."""
        return self.value


class DispatchError(msgspec.Struct, frozen=True):
    """A call that failed, as a value."""

    call_id: CallId
    failure: CallFailure
    deduplicated: bool = False
    enforced: bool = True
    repairs: tuple[Repair, ...] = ()

    @property
    def ok(self) -> Literal[False]:
        return False

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


DispatchResult = Ok | DispatchError
