"""Functions and their answers as MCP shows them. Source: tool-dispatch D23, D33, D34."""

from __future__ import annotations

import enum
from typing import Any

import mcp_types as types
import msgspec
import pytest
from mcp.shared.exceptions import MCPError

from callyard import Audio, File, Image, Message, ResourceLink
from callyard.dispatch.outcomes import DispatchError, Ok
from callyard.errors import KIND_RULES, ErrorKind, Outcome, fail
from callyard.functions.contents import encode_result
from callyard.functions.function import Promises
from callyard.functions.registry import FunctionSpec, Registry
from callyard.ids import CallId
from callyard.serve.contents import Body, to_blocks, to_body, to_messages, to_resource
from callyard.serve.mcp_tools import page_of, show, to_annotations, to_error, to_result, unknown

PNG = b"\x89PNG\r\n\x1a\n" + b"\x00" * 16


class Color(enum.Enum):
    RED = "red"


class Point(msgspec.Struct):
    x: int
    inner: dict[str, int] = {}


def spec_of(function: Any, **promises: Any) -> FunctionSpec:
    return Registry().add_function(function, **promises)


def ok(value: Any) -> Ok:
    return Ok(CallId("call-1"), encode_result(value, 2**20))


@pytest.mark.requirement("D34")
@pytest.mark.parametrize(
    ("promises", "read_only", "destructive", "idempotent"),
    [
        (Promises(), False, True, False),
        (Promises(idempotent=True), False, True, True),
        (Promises(idempotent=True, destructive=False), False, False, True),
        (Promises(destructive=False), False, False, False),
        (Promises(read_only=True), True, False, True),
        (Promises(pure=True), True, False, True),
    ],
)
def test_promises_as_hints(promises: Promises, read_only: bool, destructive: bool, idempotent: bool) -> None:
    assert to_annotations(promises) == types.ToolAnnotations(
        read_only_hint=read_only, destructive_hint=destructive, idempotent_hint=idempotent
    )


@pytest.mark.requirement("D33")
def test_an_object_is_structured_as_it_is_and_anything_else_in_a_wrapper() -> None:
    def of_object(x: int) -> Point:
        return Point(x)

    def of_number(x: int) -> int:
        return x

    def of_enum(x: int) -> list[Color]:
        return [Color.RED]

    def of_nothing(x: int):  # type: ignore[no-untyped-def]
        return x

    shown = show(spec_of(of_object))
    assert not shown.is_wrapped
    assert shown.tool.output_schema is not None
    assert shown.tool.output_schema["type"] == "object"
    assert list(shown.tool.output_schema["anyOf"][0]["properties"]) == ["x", "inner"]
    number = show(spec_of(of_number))
    assert number.is_wrapped
    assert number.tool.output_schema is not None
    assert number.tool.output_schema["anyOf"][0] == {
        "type": "object",
        "properties": {"result": {"type": "integer"}},
        "required": ["result"],
    }
    colors = show(spec_of(of_enum)).tool.output_schema
    assert colors is not None
    reference = colors["anyOf"][0]["properties"]["result"]["items"].get("$ref", "")
    assert not reference or reference.removeprefix("#/$defs/") in colors["$defs"]
    assert show(spec_of(of_nothing)).tool.output_schema is None


def test_marks_between_our_own_parts_are_not_shown() -> None:
    spec = Registry().add_tool("a", lambda arguments: None, input_schema={"type": "object"})
    marked = msgspec.structs.replace(
        spec, input_schema=msgspec.Raw(b'{"properties":{"a":{"x-callyard-unchecked":true,"x-mcp-header":"A"}}}')
    )
    assert show(marked).tool.input_schema == {"type": "object", "properties": {"a": {"x-mcp-header": "A"}}}


@pytest.mark.requirement("D33")
@pytest.mark.parametrize(
    ("value", "is_wrapped", "text", "structured"),
    [
        ("plain", False, "plain", None),
        ("plain", True, "plain", {"result": "plain"}),
        ({"a": 1}, False, '{"a":1}', {"a": 1}),
        ([1, 2], True, "[1,2]", {"result": [1, 2]}),
        (None, True, "null", {"result": None}),
        (2**70, False, str(2**70), None),
    ],
)
def test_a_value_for_a_model_and_for_a_program(value: Any, is_wrapped: bool, text: str, structured: Any) -> None:
    result = to_result(ok(value), is_wrapped=is_wrapped)
    assert result.content == [types.TextContent(text=text)]
    assert result.structured_content == structured
    assert result.meta == {"callyard/callId": "call-1"}


def test_contents_become_blocks() -> None:
    value = [
        "a text",
        Image(PNG),
        Audio(b"RIFF", "audio/wav"),
        File(b"inside", "text/plain", uri="test://a"),
        File(b"\x00\xff", "application/octet-stream", name="a b.bin"),
        ResourceLink("https://example.com/a", title="There"),
    ]
    blocks = to_blocks(encode_result(value, 2**20))
    assert blocks is not None
    assert [block.type for block in blocks] == ["text", "image", "audio", "resource", "resource", "resource_link"]
    assert isinstance(blocks[3], types.EmbeddedResource)
    assert blocks[3].resource == types.TextResourceContents(uri="test://a", mime_type="text/plain", text="inside")
    assert isinstance(blocks[4], types.EmbeddedResource)
    assert blocks[4].resource == types.BlobResourceContents(
        uri="file:///a%20b.bin", mime_type="application/octet-stream", blob="AP8="
    )
    assert to_blocks(b'{"callyard.content":"no"}') is None
    assert to_result(ok(value), is_wrapped=False).structured_content is None


def test_a_prompt_and_a_resource() -> None:
    messages = to_messages(encode_result(["Hello", Message("assistant", "Hi")], 2**20, "prompt"))
    assert [(one.role, one.content.text) for one in messages if isinstance(one.content, types.TextContent)] == [
        ("user", "Hello"),
        ("assistant", "Hi"),
    ]
    assert to_resource("a://b", encode_result({"x": 1}, 2**20, "resource")) == [
        types.TextResourceContents(uri="a://b", mime_type="application/json", text='{"x":1}')
    ]
    (image,) = to_resource("a://c", encode_result(PNG, 2**20, "resource"))
    assert isinstance(image, types.BlobResourceContents)
    assert image.mime_type == "image/png"


def test_one_content_is_a_body_of_its_own() -> None:
    assert to_body(encode_result(Image(PNG, name="a.png"), 2**20)) == Body(PNG, "image/png", "a.png")
    assert to_body(b"[1]") == Body(b"[1]", "application/json")
    assert to_body(encode_result(["a", Image(PNG)], 2**20)).mime_type == "application/json"


@pytest.mark.requirement("D23")
@pytest.mark.parametrize("kind", list(ErrorKind))
def test_every_failure_is_an_answer_with_its_envelope(kind: ErrorKind) -> None:
    failure = fail(kind, "it did not work", attempts=1, outcome=KIND_RULES[kind].outcome)
    result = to_error(DispatchError(CallId("call-1"), failure))
    assert result.is_error
    assert isinstance(result.structured_content, dict)
    assert result.structured_content["kind"] == kind.value
    assert result.structured_content["jsonrpc_code"] == KIND_RULES[kind].jsonrpc_code
    (block,) = result.content
    assert isinstance(block, types.TextContent)
    text = block.text
    assert text
    if failure.outcome is Outcome.UNKNOWN and kind is not ErrorKind.CANCELLED:
        assert "find out before calling again" in text
        assert "may be made again" not in text


@pytest.mark.requirement("D33")
def test_what_must_stay_here_is_not_told() -> None:
    failure = fail(ErrorKind.INTERNAL, "KeyError: /home/somebody/secret", attempts=1, stack="Traceback …")
    result = to_error(DispatchError(CallId("call-1"), failure))
    assert "somebody" not in result.model_dump_json()
    assert "call-1" in result.model_dump_json()


def test_an_unknown_name_suggests_what_is_close() -> None:
    error = unknown("tool", "chrage", ["charge", "refund"])
    assert (error.error.code, error.error.message) == (-32602, "Unknown tool: chrage; did you mean 'charge'?")
    assert unknown("tool", "x" * 10_000, []).error.message == f"Unknown tool: {'x' * 128}"


def test_pages() -> None:
    assert page_of([1, 2, 3], None, 2) == ([1, 2], "2")
    assert page_of([1, 2, 3], "2", 2) == ([3], None)
    assert page_of([], None) == ([], None)
    for cursor in ("", "-1", "9", "²", "1e1", "9" * 50):
        with pytest.raises(MCPError, match="unknown cursor"):
            page_of([1, 2, 3], cursor)
