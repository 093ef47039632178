"""How the end of a key's run is kept: one encoded form in every store. Source: tool-dispatch D18-D20."""

from __future__ import annotations

import time
from typing import Final

import msgspec

from callyard.dispatch.stores.port import KeyEnd
from callyard.errors import CallFailure, ErrorKind, Outcome, fail
from callyard.ids import CallId

OUTPUT_BYTES_MAX: Final = 8 << 20
"""Of one kept output: what a result may have unless its tool says otherwise (D26)."""
_FAILURE_BYTES_MAX: Final = 64 << 10
_MESSAGE_CHARACTERS_MAX: Final = 4_096


class _EncodedEnd(msgspec.Struct, frozen=True, array_like=True):
    """The call id stands beside it: a claim has one already."""

    attempts: int
    output: bytes | None
    failure: bytes | None
    """JSON: it holds integers of any size."""


_END_ENCODER: Final = msgspec.msgpack.Encoder()
_END_DECODER: Final = msgspec.msgpack.Decoder(_EncodedEnd)
_FAILURE_ENCODER: Final = msgspec.json.Encoder()
_FAILURE_DECODER: Final = msgspec.json.Decoder(CallFailure)


_STEADY: Final = getattr(time, "CLOCK_BOOTTIME", None)
"""Goes on while the machine sleeps, where there is such a clock."""


def _steady_ns() -> int:
    return time.monotonic_ns() if _STEADY is None else time.clock_gettime_ns(_STEADY)


_STARTED_NS: Final = time.time_ns() - _steady_ns()


def wall_ms() -> int:
    """Milliseconds since 1970: what outlives a process is dated by the wall clock, as it was when the process began.

    From then on a steady clock counts: a wall clock that is set ahead would have keys forgotten before their time.
    """
    return (_STARTED_NS + _steady_ns()) // 1_000_000


def is_unknown(end: KeyEnd) -> bool:
    """Nobody knows whether its effect happened."""
    return end.failure is not None and end.failure.outcome is Outcome.UNKNOWN


def is_too_large(end: KeyEnd, output_bytes_max: int) -> bool:
    """The output will not be kept: a key that may run again is freed, another one says so."""
    return end.output is not None and len(end.output) > output_bytes_max


def encode_end(end: KeyEnd, output_bytes_max: int) -> bytes:
    """What a store writes. An output above `output_bytes_max` becomes a failure that says it ran; a failure is kept
    without its local variables, which may hold secrets, and one of more than 64 KiB without its stack and details."""
    if end.failure is None:
        if not is_too_large(end, output_bytes_max):
            return _END_ENCODER.encode(_EncodedEnd(end.attempts, end.output, None))
        failure = fail(
            ErrorKind.RESULT,
            f"it ran and succeeded, but its output of {len(end.output or b'')} bytes is more than the "
            f"{output_bytes_max} that are kept under a key",
            attempts=end.attempts,
            size=len(end.output or b""),
            limit=output_bytes_max,
        )
    else:
        failure = end.failure
    return _END_ENCODER.encode(_EncodedEnd(end.attempts, None, _encode_failure(failure)))


def decode_end(call_id: CallId, encoded: bytes) -> KeyEnd:
    """A new object each time: what one caller does to it no other caller sees."""
    end = _END_DECODER.decode(encoded)
    failure = None if end.failure is None else _FAILURE_DECODER.decode(end.failure)
    return KeyEnd(call_id, end.attempts, end.output, failure)


def _encode_failure(failure: CallFailure) -> bytes:
    try:
        encoded = _FAILURE_ENCODER.encode(msgspec.structs.replace(failure, local_variables={}))
        if len(encoded) <= _FAILURE_BYTES_MAX:
            return encoded
    except (UnicodeEncodeError, TypeError, ValueError, RecursionError):
        pass  # its text or details have no JSON: the end is kept all the same
    message = failure.message[:_MESSAGE_CHARACTERS_MAX].encode(errors="replace").decode()
    bare = CallFailure(failure.kind, message, failure.retryable, failure.attempts, failure.outcome)
    return _FAILURE_ENCODER.encode(bare)


LOST_END: Final = encode_end(
    KeyEnd(
        CallId(""),
        attempts=1,
        failure=fail(
            ErrorKind.CRASHED,
            "the process that held this key was lost while the call was under way: whether it took effect is not known",
            attempts=1,
            outcome=Outcome.UNKNOWN,
            cause="holder_lost",
        ),
    ),
    OUTPUT_BYTES_MAX,
)
"""The end of a run whose holder died. One attempt: it cannot be said that none had begun."""
