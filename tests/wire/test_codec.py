"""What the codec promises beyond the vectors."""

from __future__ import annotations

import pytest
from msgspec import Raw

from callyard.errors import ProtocolError
from callyard.ids import CallId, CallNumber, Digest, FunctionId, TaskId
from callyard.wire.codec import (
    UnknownMessage,
    decode_executor_message,
    decode_worker_message,
    encode_message,
)
from callyard.wire.frames import FrameReader
from callyard.wire.messages import (
    EXECUTE_CALLS_MAX,
    RECALLED,
    BatchedCall,
    CallCompleted,
    CallCompletedPayload,
    CallFailed,
    CancelCall,
    CancelCallPayload,
    CancelReason,
    ExecuteCall,
    ExecuteCallPayload,
    ExecuteCalls,
    ExecuteCallsPayload,
)

COMPLETED = b'{"message_type":"CallCompleted","call_id":"c","payload":{"attempt_seq":1,"output":%s}}'
FAILED = b'{"message_type":"CallFailed","call_id":"c","payload":{"attempt_seq":1,"error_kind":"x"%s}}'


def execute_call(args: bytes) -> ExecuteCall:
    payload = ExecuteCallPayload(TaskId("t"), FunctionId("f"), Digest("d"), attempt_seq=1, args=Raw(args))
    return ExecuteCall(CallId("c"), payload)


@pytest.mark.requirement("X48")
@pytest.mark.parametrize(
    "text",
    [b'{ "a" : [ 1 ,2] }', b'"\\u00e9\\/"', b"1e999", b"-0", b"123456789012345678901234567890", b'{"a":1,"a":2}'],
)
def test_raw_json_passes_a_worker_byte_for_byte(text: bytes) -> None:
    (body,) = FrameReader().feed(encode_message(execute_call(text)))
    arrived, _ = decode_worker_message(body)
    assert isinstance(arrived, ExecuteCall)
    assert bytes(arrived.payload.args) == text

    answer = CallCompleted(CallId("c"), CallCompletedPayload(attempt_seq=1, output=arrived.payload.args))
    (body,) = FrameReader().feed(encode_message(answer))
    returned, _ = decode_executor_message(body)
    assert isinstance(returned, CallCompleted)
    assert bytes(returned.payload.output) == text


@pytest.mark.requirement("X48", "X50")
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("template", [COMPLETED, FAILED.replace(b"%s", b',"details":{"d":%s}')])
def test_nesting_too_deep_to_read_is_a_protocol_error(opening: bytes, template: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"malformed message of \d+ bytes: maximum recursion depth"):
        decode_executor_message(template % (opening * 200_000))


@pytest.mark.requirement("X48")
def test_nesting_of_an_unknown_message_too_deep_to_read_is_a_protocol_error() -> None:
    body = b'{"message_type":"Telepathy","payload":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    with pytest.raises(ProtocolError, match="malformed message of"):
        decode_executor_message(body)


@pytest.mark.requirement("X50")
def test_error_quotes_little_of_what_the_peer_sent() -> None:
    body = FAILED % (b',"outcome":"' + b"z" * 1_000_000 + b'"')
    with pytest.raises(ProtocolError) as caught:
        decode_executor_message(body)
    assert "Invalid enum value 'zzz" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.requirement("X50")
def test_integer_of_thousands_of_digits_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="malformed message"):
        decode_executor_message(FAILED % (b',"details":{"n":' + b"9" * 10_000 + b"}"))


@pytest.mark.requirement("X49")
def test_type_of_a_newer_version_is_told_apart_from_a_broken_frame() -> None:
    body = b'{"message_type":"Telepathy","call_id":"c","payload":{"attempt_seq":"new"}}'
    assert decode_executor_message(body) == (UnknownMessage("Telepathy", call_id="c"), None)
    with pytest.raises(ProtocolError):
        decode_executor_message(body.replace(b"Telepathy", b"CallFailed"))


@pytest.mark.requirement("X93")
def test_a_call_is_taken_back_by_a_cancel_and_answered_by_a_failure() -> None:
    recall = CancelCall(CallId("c"), CancelCallPayload(CancelReason.RECALL, attempt_seq=1))
    (body,) = FrameReader().feed(encode_message(recall))
    assert decode_worker_message(body) == (recall, None)

    answer, _ = decode_executor_message(FAILED.replace(b'"x"', b'"recalled"') % b"")
    assert isinstance(answer, CallFailed)
    assert answer.payload.error_kind == RECALLED


@pytest.mark.requirement("X94")
def test_one_frame_carries_64_calls_and_no_more() -> None:
    def batch(count: int) -> bytes:
        calls = [
            BatchedCall(CallId(f"t-{n}"), attempt_seq=1, args=Raw(b"[%d]" % n), call_number=CallNumber(n + 1))
            for n in range(count)
        ]
        payload = ExecuteCallsPayload(TaskId("t"), FunctionId("f"), Digest("d"), calls)
        (body,) = FrameReader().feed(encode_message(ExecuteCalls(payload)))
        return body

    message, _ = decode_worker_message(batch(EXECUTE_CALLS_MAX))
    assert isinstance(message, ExecuteCalls)
    assert [bytes(call.args) for call in message.payload.calls] == [b"[%d]" % n for n in range(64)]
    with pytest.raises(ProtocolError, match=r"length <= 64 - at `\$\.payload\.calls`"):
        decode_worker_message(batch(EXECUTE_CALLS_MAX + 1))
