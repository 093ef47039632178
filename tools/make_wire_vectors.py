"""Write the golden vectors of the wire that are not there yet; those that are there are never touched.

The bytes are put together here by hand, without `callyard.wire`, so that the codec is held against something that it
did not make itself. A new format or field gets new entries below, under new names. See tests/wire/vectors/README.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parent.parent / "tests" / "wire" / "vectors"
DIGEST = "6b" * 32
CAP = 16 * 1024 * 1024

Message = dict[str, Any]


class Raw(str):
    """JSON text that goes into the frame as it stands."""

    __slots__ = ()


def dump(value: Any) -> str:
    """Compact JSON with each `Raw` spliced in."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{dump(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(dump(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def describe(value: Any) -> Any:
    """The decoded form: as `value`, with each `Raw` as `{"raw": its text}`."""
    if isinstance(value, Raw):
        return {"raw": str(value)}
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [describe(item) for item in value]
    return value


def frame(body: bytes | str) -> bytes:
    data = body.encode() if isinstance(body, str) else body
    return len(data).to_bytes(4, "big") + data


def sidecar_frame(json_part: bytes | str, sidecar: bytes, json_bytes: int | None = None) -> bytes:
    data = json_part.encode() if isinstance(json_part, str) else json_part
    length = len(data) if json_bytes is None else json_bytes
    return frame(b"BXB1" + length.to_bytes(4, "big") + data + sidecar)


def envelope(message_type: str, payload: Message | None = None, **ids: str) -> Message:
    message: Message = {"message_type": message_type, **ids}
    if payload is not None:
        message["payload"] = payload
    return message


# Every value differs from its field's default: a vector marked `_full` sets every payload field.
CONTEXT: Message = {
    "trace": {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
    "tags": {"run": "nightly"},
    "owner": "account-7",
    "tenant": "blue",
    "idempotency_key": "order-7",
    "attempt": 2,
    "deadline_remaining_ms": 12000,
    "call_id": "2f61c9d0b4-7",
    "claims": {"role": "clerk"},
    "headers": {"x-team": "north"},
    "meta": Raw('{"screen": 2}'),
}
PROMISES: Message = {"idempotent": True, "exclusive": True, "preempt": True}
TIMING: Message = {"queued_ms": 3, "run_ms": 41, "wait_ms": 250}
ERROR: Message = {
    "kind": "unavailable",
    "message": "the provider is away",
    "retryable": True,
    "details": {"retry_after_ms": 500},
}
FAILED: Message = {
    "attempt_seq": 4,
    "error_kind": "internal",
    "error_message": "ZeroDivisionError: division by zero",
    "retryable": True,
    "outcome": "ran",
    "task_id": "run-1",
    "error_stack": 'File "functions.py", line 7, in assess',
    "local_variables": {"row": "{'dep_delay': 0}"},
    "details": {"line": 7, "chain": ["a", {"b": None}]},
    "budget_used_ms": 44,
    "timing": TIMING,
    "notes": ["chdir was put back"],
}

STORED: Message = {"grant": 7, "offset": 131072, "length": 30000017}
PACKED: Message = {
    "value": {"image": None, "at": [1, None]},
    "parts": [
        {"at": ["image"], "size": 3},
        {"at": ["at", 1], "size": 16, "kind": "array", "dtype": "<f8", "shape": [2]},
    ],
}
PACKED_RAW = b"\x89PN" + bytes(16)

WORKER: dict[str, Message] = {
    "execute_call_minimal": envelope(
        "ExecuteCall",
        {
            "task_id": "run-1",
            "function_id": "assess",
            "function_code_digest": DIGEST,
            "attempt_seq": 1,
            "args": Raw("[]"),
        },
        call_id="run-1-0",
    ),
    "execute_call_full": envelope(
        "ExecuteCall",
        {
            "task_id": "run-1",
            "function_id": "assess",
            "function_code_digest": DIGEST,
            "attempt_seq": 3,
            "args": Raw('{"origin":"JFK","delay":12.50,"note":"caf\\u00e9 ☕"}'),
            "call_number": 9007199254740993,
            "row": True,
            "strings": True,
            "entry_selector": "functions:assess",
            "parent_call_id": "run-1-3",
            "call_budget_ms": 5000,
            "audit": "verdict-12",
            "promises": PROMISES,
            "context": CONTEXT,
        },
        call_id="run-1-3/sub-17",
    ),
    "execute_call_spacing": envelope(
        "ExecuteCall",
        {
            "task_id": "run-1",
            "function_id": "assess",
            "function_code_digest": DIGEST,
            "attempt_seq": 1,
            "args": Raw('{ "b" :\t[1,  2.0e0 ,-0],\r\n  "a":  "x\\/y" , "b":null }'),
        },
        call_id="run-1-1",
    ),
    "execute_call_events": envelope(
        "ExecuteCall",
        {
            "task_id": "run-1",
            "function_id": "assess",
            "function_code_digest": DIGEST,
            "attempt_seq": 1,
            "args": Raw("[]"),
            "events": True,
        },
        call_id="run-1-2",
    ),
    "execute_call_check_only": envelope(
        "ExecuteCall",
        {
            "task_id": "run-1",
            "function_id": "assess",
            "function_code_digest": DIGEST,
            "attempt_seq": 1,
            "args": Raw("[]"),
            "check_only": True,
        },
        call_id="run-1-2",
    ),
    "execute_calls_check_only": envelope(
        "ExecuteCalls",
        {
            "task_id": "run-1",
            "function_id": "distance",
            "function_code_digest": DIGEST,
            "calls": [{"call_id": "run-1-0", "attempt_seq": 1, "args": Raw("[]")}],
            "check_only": True,
        },
    ),
    "execute_calls_events": envelope(
        "ExecuteCalls",
        {
            "task_id": "run-1",
            "function_id": "distance",
            "function_code_digest": DIGEST,
            "calls": [{"call_id": "run-1-0", "attempt_seq": 1, "args": Raw("[]")}],
            "events": True,
        },
    ),
    "execute_calls_minimal": envelope(
        "ExecuteCalls",
        {
            "task_id": "run-1",
            "function_id": "distance",
            "function_code_digest": DIGEST,
            "calls": [{"call_id": "run-1-0", "attempt_seq": 1, "args": Raw("[]")}],
        },
    ),
    "execute_calls_full": envelope(
        "ExecuteCalls",
        {
            "task_id": "run-1",
            "function_id": "distance",
            "function_code_digest": DIGEST,
            "calls": [
                {
                    "call_id": "run-1-0",
                    "attempt_seq": 1,
                    "args": Raw('["JFK","LAX"]'),
                    "call_number": 41,
                    "context": CONTEXT,
                },
                {"call_id": "run-1-1", "attempt_seq": 2, "args": Raw('{"origin":"EWR" }'), "call_number": 42},
            ],
            "row": True,
            "strings": True,
            "entry_selector": "functions:distance",
            "call_budget_ms": 250,
            "audit": "verdict-12",
            "promises": PROMISES,
        },
    ),
    "execute_call_stored": envelope(
        "ExecuteCall",
        {
            "task_id": "run-1",
            "function_id": "assess",
            "function_code_digest": DIGEST,
            "attempt_seq": 1,
            "args": Raw("null"),
            "result_form": {"binary": True, "nan_null": True, "bytes_max": 8388608},
            "args_at": STORED,
        },
        call_id="run-1-3",
    ),
    "execute_call_packed": envelope(
        "ExecuteCall",
        {
            "task_id": "run-1",
            "function_id": "assess",
            "function_code_digest": DIGEST,
            "attempt_seq": 1,
            "args": Raw(dump(PACKED)),
        },
        call_id="run-1-4",
    ),
    "execute_calls_result_form": envelope(
        "ExecuteCalls",
        {
            "task_id": "run-1",
            "function_id": "distance",
            "function_code_digest": DIGEST,
            "calls": [{"call_id": "run-1-0", "attempt_seq": 1, "args": Raw("[]")}],
            "result_form": {"binary": True},
        },
    ),
    "resume_call_stored": envelope(
        "ResumeCall",
        {"resume_kind": "subcall", "attempt_seq": 2, "result_at": STORED},
        call_id="run-1-0",
        request_id="r-2",
    ),
    "arena_released_by_worker": envelope("ArenaReleased", {"grants": [7, 9]}),
    "resume_call_minimal": envelope(
        "ResumeCall", {"resume_kind": "io", "attempt_seq": 1}, call_id="run-1-0", request_id="r-1"
    ),
    "resume_call_full": envelope(
        "ResumeCall",
        {
            "resume_kind": "subcall",
            "attempt_seq": 2,
            "result": Raw('{"km": 3974.34}'),
            "error": ERROR,
            "budget_used_ms": 18,
        },
        call_id="run-1-0",
        request_id="r-2",
    ),
    "cancel_call_full": envelope("CancelCall", {"reason": "deadline", "attempt_seq": 5}, call_id="run-1-0"),
    "cancel_call_recall": envelope("CancelCall", {"reason": "recall", "attempt_seq": 1}, call_id="run-1-0"),
    "heartbeat_ack_minimal": envelope("HeartbeatAck"),
    "heartbeat_ack_full": envelope("HeartbeatAck", {"heartbeat_seq": 12}),
    "describe_minimal": envelope(
        "Describe",
        {"function_code_digest": DIGEST, "path": "bundles/6b6b", "module": "pricing.functions"},
        request_id="d-1",
    ),
    "describe_full": envelope(
        "Describe",
        {"function_code_digest": DIGEST, "path": "bundles/6b6b", "module": "pricing.functions", "only_load": True},
        request_id="d-1",
    ),
}

EXECUTOR: dict[str, Message] = {
    "call_completed_minimal": envelope("CallCompleted", {"attempt_seq": 1, "output": Raw("null")}, call_id="run-1-0"),
    "call_completed_full": envelope(
        "CallCompleted",
        {
            "attempt_seq": 2,
            "output": Raw('{"speed_kmh":811.3,"codes":[ "UA" , "B6" ],"whole":18446744073709551616}'),
            "task_id": "run-1",
            "budget_used_ms": 44,
            "timing": TIMING,
            "notes": ["umask was put back", "a daemon thread is left"],
        },
        call_id="run-1-0",
    ),
    "call_completed_stored": envelope(
        "CallCompleted", {"attempt_seq": 2, "output": Raw("null"), "output_at": STORED}, call_id="run-1-0"
    ),
    "call_completed_run_time": envelope(
        "CallCompleted", {"attempt_seq": 1, "output": Raw("1"), "run_us": 1250}, call_id="run-1-0"
    ),
    "calls_settled_run_time": envelope(
        "CallsSettled", {"calls": [{"call_id": "run-1-0", "attempt_seq": 1}], "run_us": 18}
    ),
    "call_completed_packed": envelope(
        "CallCompleted", {"attempt_seq": 2, "output": Raw(dump(PACKED))}, call_id="run-1-0"
    ),
    "call_waiting_subcall_stored": envelope(
        "CallWaiting",
        {
            "wait_kind": "subcall",
            "task_id": "run-1",
            "attempt_seq": 1,
            "subcall": {"function_id": "distance", "args": Raw("null"), "args_at": STORED},
        },
        call_id="run-1-0",
        request_id="r-5",
    ),
    "arena_released_by_executor": envelope("ArenaReleased", {"grants": []}),
    "call_failed_minimal": envelope("CallFailed", {"attempt_seq": 1, "error_kind": "timeout"}, call_id="run-1-0"),
    "call_failed_full": envelope("CallFailed", FAILED, call_id="run-1-0"),
    "call_failed_recalled": envelope("CallFailed", {"attempt_seq": 1, "error_kind": "recalled"}, call_id="run-1-0"),
    "calls_settled_minimal": envelope("CallsSettled", {"calls": [{"call_id": "run-1-0", "attempt_seq": 1}]}),
    "calls_settled_full": envelope(
        "CallsSettled",
        {
            "calls": [
                {"call_id": "run-1-0", "attempt_seq": 1, "output": Raw("3974.34"), "budget_used_ms": 2},
                {"call_id": "run-1-1", "attempt_seq": 4, "failure": FAILED, "budget_used_ms": 44},
            ]
        },
    ),
    "calls_settled_timing": envelope(
        "CallsSettled",
        {
            "calls": [
                {
                    "call_id": "run-1-0",
                    "attempt_seq": 1,
                    "output": Raw("1"),
                    "timing": {"queued_ms": 2, "run_ms": 30, "wait_ms": 4},
                }
            ]
        },
    ),
    "call_waiting_minimal": envelope(
        "CallWaiting",
        {"wait_kind": "io", "task_id": "run-1", "attempt_seq": 1},
        call_id="run-1-0",
        request_id="r-1",
    ),
    "call_waiting_io": envelope(
        "CallWaiting",
        {
            "wait_kind": "io",
            "task_id": "run-1",
            "attempt_seq": 1,
            "io": {"provider": "http", "operation": "get", "request": Raw('{"url":"http://localhost/"}')},
        },
        call_id="run-1-0",
        request_id="r-1",
    ),
    "call_waiting_subcall": envelope(
        "CallWaiting",
        {
            "wait_kind": "subcall",
            "task_id": "run-1",
            "attempt_seq": 1,
            "subcall": {
                "function_id": "distance",
                "args": Raw('{"dest": "LAX", "origin": "JFK"}'),
                "ancestry": ["run-1-0"],
                "granted_budget_ms": 4800,
            },
        },
        call_id="run-1-0/sub-1",
        request_id="r-2",
    ),
    "call_waiting_subcall_spread": envelope(
        "CallWaiting",
        {
            "wait_kind": "subcall",
            "task_id": "run-1",
            "attempt_seq": 1,
            "subcall": {"function_id": "distance", "args": Raw("[1]"), "spread": True},
        },
        call_id="run-1-0",
        request_id="r-4",
    ),
    "call_waiting_function_code": envelope(
        "CallWaiting",
        {
            "wait_kind": "function_code",
            "task_id": "run-1",
            "attempt_seq": 1,
            "function_code": {"digest": DIGEST},
        },
        call_id="run-1-0",
        request_id="r-3",
    ),
    "call_waiting_new_kind": envelope(
        "CallWaiting",
        {"wait_kind": "tea", "task_id": "run-1", "attempt_seq": 1},
        call_id="run-1-0",
        request_id="r-4",
    ),
    "heartbeat_minimal": envelope("Heartbeat", {"executor_id": "exec-3", "heartbeat_seq": 0}),
    "heartbeat_full": envelope(
        "Heartbeat",
        {
            "executor_id": "exec-3",
            "heartbeat_seq": 7,
            "runnable_count": 2,
            "inflight_count": 5,
            "available_contexts": 123,
            "memory_bytes": 31457280,
            "last_scheduler_active_at_ms": 9876543210,
            "running_call_id": "run-1-0",
            "cpu_user_ms": 1200,
            "cpu_system_ms": 80,
            "draining": "a call is quarantined",
            "callyard_version": "0.1.0",
            "protocol": 1,
            "python_version": "3.11.7",
            "token": "c0ffee",
        },
    ),
    "call_event_minimal": envelope("CallEvent", {"attempt_seq": 1, "event_kind": "progress"}, call_id="run-1-0"),
    "call_event_full": envelope(
        "CallEvent",
        {
            "attempt_seq": 1,
            "event_kind": "log",
            "task_id": "run-1",
            "value": Raw('{"done": 3}'),
            "level": "warning",
            "text": "half of it\nis done",
            "cut_count": 9,
        },
        call_id="run-1-0",
    ),
    "described_minimal": envelope("Described", {"function_code_digest": DIGEST}, request_id="d-1"),
    "described_full": envelope(
        "Described",
        {
            "function_code_digest": DIGEST,
            "functions": [
                {
                    "name": "assess",
                    "entry_selector": "functions:assess",
                    "signature": "(flight: Flight) -> Assessment",
                    "description": "What became of one flight.",
                    "input_schema": Raw('{"type": "object"}'),
                    "output_schema": Raw('{"type":"number"}'),
                    "promises": Raw('{"pure":true}'),
                    "takes_row": True,
                    "is_async": True,
                    "line": 12,
                }
            ],
            "error": ERROR,
            "installed_packages": ["numpy"],
        },
        request_id="d-1",
    ),
    "described_roles": envelope(
        "Described",
        {
            "function_code_digest": DIGEST,
            "functions": [
                {
                    "name": "order",
                    "entry_selector": "functions:order",
                    "signature": "order(id: int) -> str",
                    "role": "resource",
                    "title": "An order",
                    "uri": "orders://{id}",
                    "mime_type": "text/html",
                    "completions": Raw('{"id":{"values":["1","12"]}}'),
                },
                {
                    "name": "find",
                    "entry_selector": "functions:find",
                    "signature": "find(**arguments: object)",
                    "input_schema": Raw('{"type":"object","minProperties":1}'),
                    "own_schema": True,
                },
            ],
        },
        request_id="d-2",
    ),
    "described_defined": envelope(
        "Described",
        {
            "function_code_digest": DIGEST,
            "functions": [
                {
                    "name": "score",
                    "entry_selector": "functions:score",
                    "signature": "score(x: int) -> int",
                    "defined": "shop.models:score_v2",
                },
            ],
        },
        request_id="d-3",
    ),
    "described_binary": envelope(
        "Described",
        {
            "function_code_digest": DIGEST,
            "functions": [
                {
                    "name": "blur",
                    "entry_selector": "functions:blur",
                    "signature": "blur(image: bytes) -> bytes",
                    "binary": True,
                },
            ],
        },
        request_id="d-4",
    ),
}

ACK = '{"message_type":"HeartbeatAck"}'
COMPLETED = '{"message_type":"CallCompleted","call_id":"c","payload":{"attempt_seq":1,"output":%s}}'
ACK_MESSAGE = envelope("HeartbeatAck")

# name -> (sender, bytes, [(decoded form, sidecar)], bytes of the unfinished frame at the end)
STREAMS: dict[str, tuple[str, bytes, list[tuple[Message, bytes | None]], int]] = {
    "sidecar": (
        "executor",
        sidecar_frame(dump(EXECUTOR["call_waiting_io"]), bytes(range(256))),
        [(EXECUTOR["call_waiting_io"], bytes(range(256)))],
        0,
    ),
    "packed_args": (
        "worker",
        sidecar_frame(dump(WORKER["execute_call_packed"]), PACKED_RAW),
        [(WORKER["execute_call_packed"], PACKED_RAW)],
        0,
    ),
    "packed_output": (
        "executor",
        sidecar_frame(dump(EXECUTOR["call_completed_packed"]), PACKED_RAW),
        [(EXECUTOR["call_completed_packed"], PACKED_RAW)],
        0,
    ),
    "sidecar_empty": ("worker", sidecar_frame(ACK, b""), [(ACK_MESSAGE, b"")], 0),
    "sidecar_looks_like_frames": (
        "worker",
        sidecar_frame(ACK, frame(ACK) + b"BXB1") + frame(ACK),
        [(ACK_MESSAGE, frame(ACK) + b"BXB1"), (ACK_MESSAGE, None)],
        0,
    ),
    "several": (
        "executor",
        frame(dump(EXECUTOR["heartbeat_minimal"]))
        + frame(dump(EXECUTOR["call_completed_full"]))
        + frame(dump(EXECUTOR["call_failed_minimal"])),
        [
            (EXECUTOR["heartbeat_minimal"], None),
            (EXECUTOR["call_completed_full"], None),
            (EXECUTOR["call_failed_minimal"], None),
        ],
        0,
    ),
    "unknown_fields": (
        "executor",
        frame(
            '{"zone":7,"message_type":"CallFailed","call_id":"c","payload":'
            '{"attempt_seq":1,"novel":{"deep":[{}]},"error_kind":"timeout"},"trailer":null}'
        ),
        [(envelope("CallFailed", {"attempt_seq": 1, "error_kind": "timeout"}, call_id="c"), None)],
        0,
    ),
    "fields_in_any_order": (
        "executor",
        frame(' {"payload":{"output":1,"attempt_seq":1},\n"call_id":"c","message_type":"CallCompleted"} '),
        [(envelope("CallCompleted", {"attempt_seq": 1, "output": Raw("1")}, call_id="c"), None)],
        0,
    ),
    "unknown_type": (
        "executor",
        frame('{"message_type":"CallTelepathy","call_id":"c","request_id":"r","payload":{"attempt_seq":[]}}'),
        [({"unknown": envelope("CallTelepathy", call_id="c", request_id="r")}, None)],
        0,
    ),
    "unknown_type_bare": (
        "worker",
        frame('{"message_type":"Telepathy"}'),
        [({"unknown": {"message_type": "Telepathy", "call_id": "", "request_id": ""}}, None)],
        0,
    ),
    "cut_in_length": ("worker", frame(ACK) + b"\x00\x00", [(ACK_MESSAGE, None)], 2),
    "cut_in_body": ("worker", frame(ACK) + frame(ACK)[:-1], [(ACK_MESSAGE, None)], 34),
    "cut_in_sidecar": ("worker", sidecar_frame(ACK, b"12345678")[:-3], [], 48),
    "cut_at_once": ("executor", b"", [], 0),
}

# name -> (sender, bytes, how the error begins, what else it names, whole frames before it). "malformed: " stands for
# the words that the codec puts before a cause.
INVALID: dict[str, tuple[str, bytes, str, str, int]] = {
    "length_zero": ("executor", frame(b""), "frame of 0 bytes: expected a JSON body (exec-3)", "", 0),
    "length_over_cap": (
        "executor",
        (CAP + 1).to_bytes(4, "big"),
        "frame of 16777217 bytes exceeds frame_bytes_max=16777216 (exec-3)",
        "",
        0,
    ),
    "length_huge": (
        "worker",
        b"\xff\xff\xff\xff" + ACK.encode(),
        "frame of 4294967295 bytes exceeds frame_bytes_max=16777216 (exec-3)",
        "",
        0,
    ),
    "length_huge_after_good": (
        "worker",
        frame(ACK) + frame(ACK) + b"GET / HTTP/1.1",
        "frame of 1195725856 bytes exceeds frame_bytes_max=16777216 (exec-3)",
        "",
        2,
    ),
    "sidecar_no_head": (
        "executor",
        frame(b"BXB1\x00\x00"),
        "sidecar frame of 6 bytes: expected a head of 8 bytes",
        "",
        0,
    ),
    "sidecar_no_json": (
        "executor",
        sidecar_frame("", b"raw"),
        "sidecar frame of 11 bytes names 0 bytes of JSON",
        "",
        0,
    ),
    "sidecar_json_too_long": (
        "executor",
        sidecar_frame(ACK, b"", json_bytes=32),
        "sidecar frame of 39 bytes names 32 bytes of JSON",
        "",
        0,
    ),
    "sidecar_json_cut": (
        "worker",
        sidecar_frame(ACK, b"", json_bytes=30),
        "malformed: ",
        "",
        0,
    ),
    "magic_only_once": ("executor", frame(b"BXB2\x00\x00\x00\x02{}"), "malformed: ", "", 0),
    "not_json": ("executor", frame("hello"), "malformed: ", "", 0),
    "not_an_object": ("executor", frame("[1,2]"), "malformed: ", "", 0),
    "empty_object": ("executor", frame("{}"), "malformed: ", "message_type", 0),
    "trailing_bytes": ("worker", frame(ACK + "{}"), "malformed: ", "", 0),
    "byte_order_mark": ("worker", frame("\ufeff" + ACK), "malformed: ", "", 0),
    "utf_16": ("worker", frame(ACK.encode("utf-16-le")), "malformed: ", "", 0),
    "utf_8_broken_in_text": (
        "executor",
        frame(b'{"message_type":"CallFailed","call_id":"\xc3","payload":{}}'),
        "malformed: 'utf-8' codec can't decode byte 0xc3",
        "",
        0,
    ),
    "utf_8_broken_in_output": (
        "executor",
        frame(COMPLETED.encode() % b'"\xff"'),
        "malformed: 'utf-8' codec can't decode byte 0xff",
        "",
        0,
    ),
    "utf_8_surrogate_in_output": (
        "executor",
        frame(COMPLETED.encode() % b'"\xed\xa0\x80"'),
        "malformed: 'utf-8' codec can't decode byte 0xed",
        "",
        0,
    ),
    "utf_8_broken_in_unknown_type": (
        "executor",
        frame(b'{"message_type":"Telepathy","payload":"\xff"}'),
        "malformed: 'utf-8' codec can't decode byte 0xff",
        "",
        0,
    ),
    "output_nan": ("executor", frame(COMPLETED % "NaN"), "malformed: ", "", 0),
    "output_missing_value": ("executor", frame(COMPLETED % ""), "malformed: ", "", 0),
    "output_two_values": ("executor", frame(COMPLETED % "1 2"), "malformed: ", "", 0),
    "output_control_character": (
        "executor",
        frame(COMPLETED % '"\n"'),
        "malformed: ",
        "",
        0,
    ),
    "output_lone_surrogate": (
        "executor",
        frame(COMPLETED % '"\\udc00"'),
        "malformed: ",
        "",
        0,
    ),
    "output_leading_zero": ("executor", frame(COMPLETED % "-01"), "malformed: ", "", 0),
    "stored_negative": (
        "executor",
        frame(
            '{"message_type":"CallCompleted","call_id":"c","payload":{"attempt_seq":1,"output":null,'
            '"output_at":{"grant":1,"offset":-4096,"length":1}}}'
        ),
        "malformed: ",
        "$.payload.output_at.offset",
        0,
    ),
    "stored_without_length": (
        "executor",
        frame(
            '{"message_type":"CallCompleted","call_id":"c","payload":{"attempt_seq":1,"output":null,'
            '"output_at":{"grant":1,"offset":0}}}'
        ),
        "malformed: ",
        "length",
        0,
    ),
    "payload_missing": (
        "executor",
        frame('{"message_type":"CallCompleted","call_id":"c"}'),
        "malformed: ",
        "payload",
        0,
    ),
    "payload_null": (
        "executor",
        frame('{"message_type":"Heartbeat","payload":null}'),
        "malformed: ",
        "$.payload",
        0,
    ),
    "attempt_seq_missing": (
        "executor",
        frame('{"message_type":"CallFailed","call_id":"c","payload":{"error_kind":"timeout"}}'),
        "malformed: ",
        "attempt_seq",
        0,
    ),
    "attempt_seq_text": (
        "executor",
        frame('{"message_type":"CallFailed","call_id":"c","payload":{"attempt_seq":"1","error_kind":"x"}}'),
        "malformed: ",
        "$.payload.attempt_seq",
        0,
    ),
    "attempt_seq_bool": (
        "executor",
        frame('{"message_type":"CallFailed","call_id":"c","payload":{"attempt_seq":true,"error_kind":"x"}}'),
        "malformed: ",
        "$.payload.attempt_seq",
        0,
    ),
    "attempt_seq_float": (
        "executor",
        frame('{"message_type":"CallFailed","call_id":"c","payload":{"attempt_seq":1.5,"error_kind":"x"}}'),
        "malformed: ",
        "$.payload.attempt_seq",
        0,
    ),
    "attempt_seq_negative": (
        "executor",
        frame('{"message_type":"CallFailed","call_id":"c","payload":{"attempt_seq":-1,"error_kind":"x"}}'),
        "malformed: ",
        "$.payload.attempt_seq",
        0,
    ),
    "budget_used_over_64_bits": (
        "executor",
        frame(
            '{"message_type":"CallFailed","call_id":"c","payload":'
            '{"attempt_seq":1,"error_kind":"x","budget_used_ms":9223372036854775808}}'
        ),
        "malformed: ",
        "$.payload.budget_used_ms",
        0,
    ),
    "call_id_missing": (
        "executor",
        frame('{"message_type":"CallFailed","payload":{"attempt_seq":1,"error_kind":"x"}}'),
        "malformed: ",
        "call_id",
        0,
    ),
    "resume_kind_unknown": (
        "worker",
        frame(
            '{"message_type":"ResumeCall","call_id":"c","request_id":"r",'
            '"payload":{"resume_kind":"tea","attempt_seq":1}}'
        ),
        "malformed: ",
        "$.payload.resume_kind",
        0,
    ),
    "calls_none": (
        "worker",
        frame(
            '{"message_type":"ExecuteCalls","payload":{"task_id":"t","function_id":"f",'
            '"function_code_digest":"d","calls":[]}}'
        ),
        "malformed: ",
        "$.payload.calls",
        0,
    ),
    "calls_over_64": (
        "worker",
        frame(
            '{"message_type":"ExecuteCalls","payload":{"task_id":"t","function_id":"f",'
            '"function_code_digest":"d","calls":['
            + ",".join(['{"call_id":"c","attempt_seq":1,"args":[]}'] * 65)
            + "]}}"
        ),
        "malformed: ",
        "$.payload.calls",
        0,
    ),
    "wrong_direction": (
        "executor",
        frame(dump(WORKER["execute_call_minimal"])),
        "malformed: ",
        "$.message_type",
        0,
    ),
    "type_not_text": ("executor", frame('{"message_type":7}'), "malformed: ", "$.message_type", 0),
    "type_too_long": (
        "executor",
        frame('{"message_type":"' + "T" * 129 + '"}'),
        "malformed: ",
        "",
        0,
    ),
    "unknown_type_call_id_number": (
        "executor",
        frame('{"message_type":"Telepathy","call_id":7}'),
        "malformed: ",
        "",
        0,
    ),
}


def write(path: Path, data: bytes) -> int:
    """1 if the file was written, 0 if it was there already."""
    if path.exists():
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return 1


def write_vector(folder: str, name: str, data: bytes, description: Message) -> int:
    text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    written = write(VECTORS / folder / f"{name}.frames", data)
    return written + write(VECTORS / folder / f"{name}.json", text.encode())


def main() -> int:
    written = 0
    for sender, messages in (("worker", WORKER), ("executor", EXECUTOR)):
        for name, message in messages.items():
            description = {
                "sender": sender,
                "encoder_writes_this": True,
                "frames": [{"message": describe(message), "sidecar": None}],
                "pending_bytes": 0,
            }
            written += write_vector("valid", name, frame(dump(message)), description)
    for name, (sender, data, decoded, pending_bytes) in STREAMS.items():
        description = {
            "sender": sender,
            "encoder_writes_this": False,
            "frames": [
                {"message": describe(message), "sidecar": None if sidecar is None else sidecar.hex()}
                for message, sidecar in decoded
            ],
            "pending_bytes": pending_bytes,
        }
        written += write_vector("valid", name, data, description)
    for name, (sender, data, error, place, frames_before) in INVALID.items():
        error = error.replace("malformed: ", f"malformed message of {len(data) - 4} bytes: ")
        description = {"sender": sender, "error": error, "place": place, "frames_before": frames_before}
        written += write_vector("invalid", name, data, description)
    print(f"{written} files written to {VECTORS.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
