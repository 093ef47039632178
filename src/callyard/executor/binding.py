"""Which bundle this process serves: bound to the first digest that it is sent, asked for once, loaded once (X40)."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from callyard.errors import ErrorKind, Outcome, ProtocolError
from callyard.executor import failures
from callyard.executor.code import Code, NotUsable
from callyard.executor.contexts import Call
from callyard.executor.failures import Fault
from callyard.executor.link import Link
from callyard.ids import Digest, RequestId
from callyard.wire.codec import encode_message
from callyard.wire.messages import (
    CODE_PART,
    CallWaiting,
    CallWaitingPayload,
    CodeRequest,
    Describe,
    Described,
    DescribedFunction,
    DescribedPayload,
    ResumeCall,
    WaitKind,
    WireError,
)

if TYPE_CHECKING:
    from callyard.executor.archive import Unpacker


class CodePlace(msgspec.Struct, frozen=True):
    """Where the worker put a bundle: `result` of the ResumeCall that answers for code."""

    path: str
    """Empty: its bytes have come over the link, in parts before this."""
    module: str


class Binding:
    def __init__(self, link: Link, load: Callable[[Digest, CodePlace], Code]) -> None:
        """`load` runs the bundle's own code."""
        self.code: Code | None = None
        """None: not loaded yet."""
        self._link = link
        self._load = load
        self._digest: Digest | None = None
        self._waiting: deque[Call] = deque()
        self._request: RequestId | None = None
        self._requests = 0
        self._unpacker: Unpacker | None = None
        self._no_room: WireError | None = None
        """Why the parts that came could not be kept."""

    def admit(self, call: Call) -> Fault | None:
        """See to the code of a call that is not loaded: the call waits here, or fails with what is returned."""
        digest = call.payload.function_code_digest
        if self._digest is None:
            self._digest = digest
            self._ask(call)
        elif self._digest != digest:
            return Fault(ErrorKind.INTERNAL, self._mismatch(digest), Outcome.NOT_RUN)
        self._waiting.append(call)
        return None

    def _ask(self, call: Call) -> None:
        self._requests += 1
        self._request = RequestId(f"code-{self._requests}")
        payload = CallWaitingPayload(
            wait_kind=WaitKind.FUNCTION_CODE,
            task_id=call.payload.task_id,
            attempt_seq=call.payload.attempt_seq,
            function_code=CodeRequest(call.payload.function_code_digest),
        )
        self._link.put(encode_message(CallWaiting(call.call_id, self._request, payload)))

    def takes_answer(self, message: ResumeCall) -> bool:
        """Whether this is the answer that we wait for; once. Or a part of the code, which comes unasked before it."""
        if message.request_id.startswith(CODE_PART):
            return True
        expected = message.payload.resume_kind is WaitKind.FUNCTION_CODE and message.request_id == self._request
        if expected:
            self._request = None
        return expected

    def take_code(self, message: ResumeCall) -> Iterable[Call]:
        """Load what the worker sent. Returns the calls that waited. Raises `ProtocolError`, or `CodeRefused`."""
        if message.request_id.startswith(CODE_PART):
            self._unpack(self._link.sidecars.pop(message.request_id, b""))
            return ()
        assert self._digest is not None
        error = message.payload.error or self._no_room
        if error is None:
            self._load_once(self._digest, _read_place(message))
            return self._no_longer_waiting()
        self._digest = None  # bound to nothing: the next call asks again
        raise CodeRefused(error, self._no_longer_waiting())

    def describe(self, message: Describe) -> Iterable[Call]:
        """Load, if need be, and answer. Returns the calls that waited."""
        wanted = message.payload
        error: WireError | None = None
        functions: list[DescribedFunction] = []
        packages: list[str] = []
        freed: Iterable[Call] = ()
        if self._digest not in (None, wanted.function_code_digest):
            error = WireError(ErrorKind.INTERNAL, self._mismatch(wanted.function_code_digest))
        elif self._no_room is not None:
            error = self._no_room
        else:
            code = self._load_once(wanted.function_code_digest, CodePlace(wanted.path, wanted.module))
            freed = self._no_longer_waiting()
            try:
                functions, packages = ([], []) if wanted.only_load else code.describe_bundle(wanted.names)
            except NotUsable as failure:
                fault = failure.fault
                error = code.error or WireError(fault.kind, fault.message, details=fault.details)
        payload = DescribedPayload(wanted.function_code_digest, functions, error, packages)
        self._link.put(encode_message(Described(message.request_id, payload)))
        return freed

    def _load_once(self, digest: Digest, place: CodePlace) -> Code:
        if self.code is None:
            self._digest, self._request = digest, None
            self.code = self._load(digest, place if place.path else self._unpacked(digest, place.module))
        return self.code

    def _unpack(self, part: bytes) -> None:
        """Keep a part of the bundle, in the one folder that a confined executor may write to.

        Raises `ProtocolError` for what is no archive. No room is an answer: that bundle cannot be loaded here.
        """
        if self.code is not None:
            raise ProtocolError("code came for an executor that has loaded its bundle")
        if self._no_room is not None:
            return
        from callyard.executor.archive import Unpacker  # only a confined executor needs it

        try:
            if self._unpacker is None:
                self._unpacker = Unpacker(Path(os.environ.get("TMPDIR", "/tmp"), "bundle"))
            self._unpacker.feed(part)
        except OSError as error:
            message = f"no room for the bundle in the executor's {error.filename or 'tmp'}: {error.strerror}"
            self._no_room = WireError(ErrorKind.RESOURCE_LIMIT, f"{message} (sandbox_tmp_bytes)")

    def _unpacked(self, digest: Digest, module: str) -> CodePlace:
        if self._unpacker is None:
            raise ProtocolError("expected the path of the bundle, or its bytes before this")
        self._unpacker.finish(digest)
        return CodePlace(str(self._unpacker.folder), module)

    def _no_longer_waiting(self) -> list[Call]:
        waiting = [call for call in self._waiting if not call.over]
        self._waiting.clear()
        return waiting

    def _mismatch(self, digest: Digest) -> str:
        return f"this executor serves bundle {self._digest} only, and was sent {digest}"


class CodeRefused(Exception):
    """The worker has no code for us: each of `calls` fails with `fault`."""

    def __init__(self, error: WireError, calls: list[Call]) -> None:
        super().__init__(error.message)
        self.fault = failures.fault_of(error)
        self.retryable = error.retryable
        self.calls = calls


def _read_place(message: ResumeCall) -> CodePlace:
    try:
        return msgspec.json.decode(message.payload.result, type=CodePlace)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"ResumeCall of function_code: expected path and module: {error}") from error
