"""What MCP shows of functions and of their answers: pure mappings, no connection and no clock.

| ours | MCP's |
| --- | --- |
| `FunctionSpec` | `Tool`: its promises are the annotations, its schemas the schemas |
| `Ok` | `CallToolResult`: blocks for a model, `structuredContent` for a program |
| `DispatchError` | `CallToolResult` with `isError`, the envelope, and a text that says what to do |
| a name that nobody has | a protocol error, code -32602 |

Source: tool-dispatch D23, D33, D34.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import mcp_types as types
import msgspec
from mcp.shared.exceptions import MCPError

from callyard.dispatch.loop_event import Repeat, loop_event
from callyard.dispatch.outcomes import DispatchError, Ok
from callyard.errors import ErrorKind, Outcome
from callyard.functions.function import Promises
from callyard.functions.registry import FunctionSpec
from callyard.serve.contents import is_text, to_blocks

T = TypeVar("T")

PREFIX: Final = "callyard/"
"""Of our own keys in `_meta`. MCP asks for labels and a slash; a reverse domain name is a SHOULD, and Callyard has no
domain."""
WRAPPED: Final = "result"
"""The one property of a structured result whose schema is not of an object: MCP wants an object at the root."""
PAGE_ITEMS: Final = 100
"""Most entries of one page of a list."""
KEPT: Final = "kept"
"""The one property of the structured result in place of one that was too large."""
_INSTEAD: Final[tuple[dict[str, Any], ...]] = (
    {
        "type": "object",
        "title": "Failure",
        "properties": {
            "kind": {"enum": [kind.value for kind in ErrorKind]},
            "message": {"type": "string"},
            "outcome": {"enum": [outcome.value for outcome in Outcome]},
        },
        "required": ["kind", "message", "outcome"],
    },
    {"type": "object", "title": "Kept", "properties": {KEPT: {"type": "object"}}, "required": [KEPT]},
)
"""What a structured result may be instead: the envelope of a failure, a preview. Clients check those as well."""
_ANYTHING: Final = ({"type": "array"}, {"type": "array", "items": {}})
"""Schemas of lists that say nothing of what is in them: it may be images, which are no structured result."""
_OURS: Final = "x-callyard-"
_ROOT: Final = ("$defs", "$schema")


# --- tools --------------------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """A function as clients see it, made once."""

    spec: FunctionSpec
    tool: types.Tool
    is_wrapped: bool
    """Its structured result is `{"result": …}`: the schema of what it returns is not of an object."""


def show(spec: FunctionSpec) -> Shown:
    output_schema, is_wrapped = output_schema_of(spec)
    tool = types.Tool(
        name=spec.name,
        title=title_of(spec),
        description=spec.description or f"{spec.name}{spec.signature}",
        input_schema=input_schema_of(spec),
        output_schema=output_schema,
        annotations=to_annotations(spec.promises),
        _meta={f"{PREFIX}tags": list(spec.promises.tags)} if spec.promises.tags else None,
    )
    return Shown(spec, tool, is_wrapped)


def title_of(spec: FunctionSpec) -> str:
    """For people: what the author says, else the name in words."""
    return spec.title or spec.name.replace("_", " ").replace("-", " ").strip().capitalize()


def to_annotations(promises: Promises) -> types.ToolAnnotations:
    """The promises as MCP's hints. What was not said is hinted at as the worst, which is MCP's own default too."""
    destructive = not promises.read_only if promises.destructive is None else promises.destructive
    return types.ToolAnnotations(
        read_only_hint=promises.read_only, destructive_hint=destructive, idempotent_hint=promises.idempotent
    )


def input_schema_of(spec: FunctionSpec) -> dict[str, Any]:
    schema: dict[str, Any] = _without_ours(msgspec.json.decode(spec.input_schema))
    return schema if schema.get("type") == "object" else {"type": "object", **schema}


def output_schema_of(spec: FunctionSpec) -> tuple[dict[str, Any] | None, bool]:
    """The schema of `structuredContent`, and whether the value stands in `{"result": …}` there. None: nothing is
    promised of it."""
    raw = bytes(spec.output_schema)
    schema = None if raw == b"{}" else _without_ours(msgspec.json.decode(raw))
    if not schema or not isinstance(schema, dict):
        return None, False
    found = _object_root(schema)
    inner = {key: value for key, value in (found or schema).items() if key not in _ROOT}
    if {key: value for key, value in inner.items() if key != "title"} in _ANYTHING:
        return None, False
    if found is None:
        inner = {"type": "object", "properties": {WRAPPED: inner}, "required": [WRAPPED]}
    root = {key: schema[key] for key in _ROOT if key in schema}  # references are from there
    return {"type": "object", "anyOf": [inner, *_INSTEAD], **root}, found is None


def _object_root(schema: dict[str, Any]) -> dict[str, Any] | None:
    """`schema` when it is of an object, a root that only refers to one spelled out; else None."""
    if schema.get("type") == "object":
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        found = schema.get("$defs", {}).get(reference.removeprefix("#/$defs/"))
        if isinstance(found, dict) and found.get("type") == "object":
            return {**{key: value for key, value in schema.items() if key != "$ref"}, **found}
    return None


def _without_ours(schema: Any) -> Any:
    """Marks between our own parts say nothing to a client."""
    if isinstance(schema, dict):
        return {key: _without_ours(value) for key, value in schema.items() if not str(key).startswith(_OURS)}
    if isinstance(schema, list):
        return [_without_ours(value) for value in schema]
    return schema


# --- prompts, resources -------------------------------------------------------------------------------------------


def to_prompt(spec: FunctionSpec) -> types.Prompt:
    return types.Prompt(
        name=spec.name,
        title=title_of(spec),
        description=spec.description or None,
        arguments=[
            types.PromptArgument(name=one.name, description=one.description or None, required=one.required)
            for one in spec.arguments()
        ],
    )


def to_resource_entry(spec: FunctionSpec) -> types.Resource:
    return types.Resource(
        uri=spec.uri,
        name=spec.name,
        title=title_of(spec),
        description=spec.description or None,
        mime_type=spec.mime_type or None,
    )


def to_template(spec: FunctionSpec) -> types.ResourceTemplate:
    return types.ResourceTemplate(
        uri_template=spec.uri,
        name=spec.name,
        title=title_of(spec),
        description=spec.description or None,
        mime_type=spec.mime_type or None,
    )


# --- pages --------------------------------------------------------------------------------------------------------


def page_of(items: Sequence[T], cursor: str | None, size: int = PAGE_ITEMS) -> tuple[list[T], str | None]:
    """One page, and the cursor of the next. Raises `MCPError` for a cursor that this server did not give out."""
    start = 0
    if cursor is not None:
        if not cursor.isascii() or not cursor.isdecimal() or len(cursor) > 9 or int(cursor) > len(items):
            raise MCPError(types.INVALID_PARAMS, f"unknown cursor {cursor[:40]!r}: ask for the list from its start")
        start = int(cursor)
    end = start + size
    return list(items[start:end]), str(end) if end < len(items) else None


# --- answers ------------------------------------------------------------------------------------------------------


def to_result(ok: Ok, *, is_wrapped: bool) -> types.CallToolResult:
    blocks = to_blocks(ok.output)
    meta = call_meta(ok)
    if blocks is not None:
        return types.CallToolResult(content=blocks, _meta=meta)
    text = is_text(ok.output)
    structured = None
    if is_wrapped:
        structured = {WRAPPED: msgspec.json.decode(ok.output)}
    elif ok.output.startswith(b"{"):
        structured = msgspec.json.decode(ok.output)
    return types.CallToolResult(
        content=[types.TextContent(text=ok.output.decode() if text is None else text)],
        structured_content=structured,
        _meta=meta,
    )


def call_meta(result: Ok | DispatchError) -> dict[str, Any]:
    """What an answer says of its call, under our own prefix."""
    meta: dict[str, Any] = {f"{PREFIX}callId": result.call_id}
    if result.deduplicated:
        meta[f"{PREFIX}deduplicated"] = True
    return meta


def to_error(error: DispatchError) -> types.CallToolResult:
    """A failure that a model can act on."""
    envelope = error.to_json(remote=True)
    return types.CallToolResult(
        content=[types.TextContent(text=tell(error, envelope))],
        structured_content=envelope,
        is_error=True,
        _meta=call_meta(error),
    )


_ADVICE: Final[Mapping[ErrorKind, str]] = {
    ErrorKind.SCHEMA: "Correct the arguments and call again.",
    ErrorKind.CONFLICT: "This key was used with other arguments: give the arguments of then, or another key.",
    ErrorKind.DENIED: "It is not allowed; calling again will not help.",
    ErrorKind.BUDGET_EXCEEDED: "No calls are left: stop calling tools and answer with what there is.",
    ErrorKind.SHUTTING_DOWN: "The server is stopping: call again once it is back.",
    ErrorKind.RESULT: "It ran, and its result cannot be sent: ask for less, or for another form.",
    ErrorKind.TOOL_ERROR: "",
    ErrorKind.INTERNAL: "It ran and failed by a fault of its own; the same call will most likely fail again.",
}


def unknown(what: str, name: str, seen: Iterable[str], data: Any = None) -> MCPError:
    """A name that nobody has, or that this caller does not see: the client's mistake. `seen`: what it does see."""
    close = difflib.get_close_matches(name[:128], list(seen), n=3)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return MCPError(types.INVALID_PARAMS, f"Unknown {what}: {name[:128]}{hint}", data)


def tell(error: DispatchError, envelope: Mapping[str, Any]) -> str:
    """The failure in words, and what to do now."""
    lines = [str(envelope["message"]) or str(envelope["kind"])]
    problems = envelope["details"].get("errors")
    if error.kind is ErrorKind.SCHEMA and isinstance(problems, list) and len(problems) > 1:
        lines += [f"- {_problem(one)}" for one in problems[:20] if isinstance(one, dict)]
    advice = _advice(error)
    return "\n".join([*lines, advice] if advice else lines)


def _problem(problem: Mapping[str, Any]) -> str:
    where = problem.get("pointer") or "the arguments"
    expected = f" (expected {problem['expected']})" if problem.get("expected") else ""
    return f"{where}: {problem.get('message', '')}{expected}"


def _advice(error: DispatchError) -> str:
    if error.kind in _ADVICE:
        return _ADVICE[error.kind]
    event = loop_event(error)
    wait = f" Wait {event.retry_after_ms} ms before." if event.retry_after_ms else ""
    if event.repeat is Repeat.YES:
        return f"Nothing was done: the same call may be made again.{wait}"
    if event.repeat is Repeat.SAME_KEY:
        return (
            "It may have had its effect, or a part of it: find out before calling again, and repeat it only under the"
            f" idempotency key that it had.{wait}"
        )
    return ""
