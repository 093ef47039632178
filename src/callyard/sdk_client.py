"""Questions to whoever made the call: `elicit` asks the person, `sample` the client's model, `list_roots` for folders.

Only a call that came by a gate whose clients answer questions (MCP) has somebody to ask; others get `CallError` of kind
`denied`. The call that asks waits, and no other; what the answer takes counts against no budget, timeout or deadline.
The forms with an `a` are awaited, so that an `async def` may have several questions under way: they reach the client
together. `name` is what the client knows a question by, where its protocol has names; without one that is the kind.
In a test, `callyard.sdk_io.fake_io` says what is answered (`provider` is `client`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, overload

import msgspec

from callyard.errors import CallError, ErrorKind, UsageError, fail
from callyard.functions.current import ASK_PROVIDER, RUNNING, RunningCall
from callyard.sdk import IoReply
from callyard.sdk_io import IoRuntime, Question

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

Action = Literal["accept", "decline", "cancel"]
NAME_CHARACTERS_MAX: Final = 128
_PRIMITIVE: Final = frozenset({"string", "number", "integer", "boolean"})
_NO_QUESTION: Final = {"type": "object", "properties": {}}


class _Question(Question):
    """A worker's, or of a call that runs in a dispatcher's own process."""

    __slots__ = ()

    def _find_here(self) -> IoRuntime | None:
        running = RUNNING.get()
        return None if running is None else _Here(running)


class _Here:
    """Questions of a handler, which its dispatcher hands to the client."""

    def __init__(self, running: RunningCall) -> None:
        self._running = running

    def io(self, provider: str, operation: str, request: bytes, body: bytes | None = None) -> IoReply:
        return IoReply(self._running.ask(operation, request))

    async def aio(self, provider: str, operation: str, request: bytes, body: bytes | None = None) -> IoReply:
        return IoReply(await self._running.aask(operation, request))


def _question(operation: str, params: Mapping[str, Any], name: str | None) -> Question:
    from callyard.functions.encoding import encode_value  # not for those who never ask

    if name is not None:
        if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
            raise UsageError(
                f"{operation}: name must be printable text of 1 to {NAME_CHARACTERS_MAX} characters, got {name!r}"[:300]
            )
        params = {**params, "name": name}
    return _Question(ASK_PROVIDER, operation, encode_value(params), None, False)


class Elicited(msgspec.Struct, Generic[T], frozen=True):
    """What a person answered."""

    action: Action
    """`accept`: answered; `decline`: said no; `cancel`: closed the question."""
    value: T | None = None
    """The answer, when it is `accept`."""

    @property
    def accepted(self) -> bool:
        return self.action == "accept"


class Sampled(msgspec.Struct, frozen=True):
    """What the client's model wrote."""

    text: str
    """Its text; empty when the content is of another kind."""
    content: Any
    """The content as it came: one block, or a list of blocks."""
    model: str
    stop_reason: str = ""


class Root(msgspec.Struct, frozen=True):
    """A folder or file that the client works on."""

    uri: str
    name: str = ""


# --- elicit -------------------------------------------------------------------------------------------------------


@overload
def elicit(message: str, schema: type[T], *, name: str | None = ...) -> Elicited[T]: ...
@overload
def elicit(
    message: str, schema: Mapping[str, Any] | None = ..., *, name: str | None = ...
) -> Elicited[dict[str, Any]]: ...
def elicit(message: str, schema: Any = None, *, name: str | None = None) -> Elicited[Any]:
    """Ask the person at the client, and wait for the answer.

    `schema` is a class whose fields are texts, numbers, booleans, enums, or lists of choices (a dataclass, TypedDict,
    msgspec Struct or pydantic model: `value` is then an instance), or a JSON Schema of such an object (`value` is a
    dict). None: a plain yes or no. Raises `CallError`: `denied` when nobody can be asked, `schema` for an answer that
    does not fit, and `UsageError` for a schema that a form cannot show.
    """
    form = _Form(message, schema, name)
    return form.question.ask(form.read)


@overload
async def aelicit(message: str, schema: type[T], *, name: str | None = ...) -> Elicited[T]: ...
@overload
async def aelicit(
    message: str, schema: Mapping[str, Any] | None = ..., *, name: str | None = ...
) -> Elicited[dict[str, Any]]: ...
async def aelicit(message: str, schema: Any = None, *, name: str | None = None) -> Elicited[Any]:
    """As `elicit`, awaited."""
    form = _Form(message, schema, name)
    return await form.question.aask(form.read)


class _Form:
    """A question to a person, and how its answer is read."""

    def __init__(self, message: str, schema: Any, name: str | None) -> None:
        self._adapter: TypeAdapter[Any] | None = None
        if schema is None:
            asked: Mapping[str, Any] = _NO_QUESTION
        elif isinstance(schema, Mapping):
            asked = schema
        else:
            from pydantic import TypeAdapter

            from callyard.functions.type_hooks import prepare_types

            prepare_types([schema])
            self._adapter = TypeAdapter(schema)
            asked = _flatten(self._adapter.json_schema())
        _check_form(asked)
        self.question = _question("elicit", {"message": str(message), "requestedSchema": asked}, name)

    def read(self, reply: IoReply) -> Elicited[Any]:
        answer = msgspec.json.decode(reply.result, type=_ElicitAnswer)
        if answer.action != "accept":
            return Elicited(answer.action)
        content: Any = answer.content or {}
        if self._adapter is not None:
            try:
                content = self._adapter.validate_json(msgspec.json.encode(content))
            except ValueError as error:
                raise CallError(fail(ErrorKind.SCHEMA, f"the answer does not fit what was asked: {error}")) from None
        return Elicited("accept", content)


class _ElicitAnswer(msgspec.Struct):
    action: Action
    content: dict[str, Any] | None = None


def _flatten(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A form has no references: an enum of the class stands where it is used."""
    definitions = schema.get("$defs", {})

    def shown(value: Any) -> Any:
        if isinstance(value, list):
            return [shown(one) for one in value]
        if not isinstance(value, Mapping):
            return value
        reference = value.get("$ref")
        found = definitions.get(str(reference).rpartition("/")[2]) if reference else None
        inner = {**found, **{key: one for key, one in value.items() if key != "$ref"}} if found else value
        return {key: shown(one) for key, one in inner.items()}

    flat = {key: shown(value) for key, value in schema.items() if key != "$defs"}
    for name, field in flat.get("properties", {}).items():
        flat["properties"][name] = _without_null(field)
    return flat


def _without_null(field: dict[str, Any]) -> dict[str, Any]:
    """`int | None` is a field that may be left out."""
    kinds = [one for one in field.get("anyOf", ()) if one.get("type") != "null"]
    if len(kinds) != 1:
        return field
    rest = {key: value for key, value in field.items() if key != "anyOf" and not (key == "default" and value is None)}
    return {**kinds[0], **rest}


def _check_form(schema: Mapping[str, Any]) -> None:
    properties = schema.get("properties")
    if schema.get("type") != "object" or not isinstance(properties, Mapping):
        raise UsageError('elicit: schema must be of an object with "properties", as a form has fields')
    for name, field in properties.items():
        if not isinstance(field, Mapping) or not _is_field(field):
            raise UsageError(
                f"elicit: the field {name!r} must be a text, a number, a boolean, an enum, or a list of choices, got "
                f"{field!r}: a form can show nothing else"
            )


def _is_field(field: Mapping[str, Any]) -> bool:
    if field.get("type") == "array":
        items = field.get("items")
        return isinstance(items, Mapping) and any(key in items for key in ("enum", "anyOf", "oneOf"))
    return field.get("type") in _PRIMITIVE


# --- sample -------------------------------------------------------------------------------------------------------


def sample(
    messages: str | Sequence[Mapping[str, Any]],
    *,
    max_tokens: int = 1_000,
    system_prompt: str | None = None,
    temperature: float | None = None,
    stop_sequences: Sequence[str] | None = None,
    model_hints: Sequence[str] | None = None,
    name: str | None = None,
) -> Sampled:
    """Have the client's model write something, and wait for it.

    `messages` is a text, or messages as MCP has them: `{"role": "user", "content": {"type": "text", "text": …}}`.
    Raises `CallError`: `denied` when the client has no model to ask, or its person said no.
    """
    question = _sampling(messages, max_tokens, system_prompt, temperature, stop_sequences, model_hints, name)
    return question.ask(_read_sampled)


async def asample(
    messages: str | Sequence[Mapping[str, Any]],
    *,
    max_tokens: int = 1_000,
    system_prompt: str | None = None,
    temperature: float | None = None,
    stop_sequences: Sequence[str] | None = None,
    model_hints: Sequence[str] | None = None,
    name: str | None = None,
) -> Sampled:
    """As `sample`, awaited."""
    question = _sampling(messages, max_tokens, system_prompt, temperature, stop_sequences, model_hints, name)
    return await question.aask(_read_sampled)


def _sampling(
    messages: str | Sequence[Mapping[str, Any]],
    max_tokens: int,
    system_prompt: str | None,
    temperature: float | None,
    stop_sequences: Sequence[str] | None,
    model_hints: Sequence[str] | None,
    name: str | None,
) -> Question:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": {"type": "text", "text": messages}}]
    options = {
        "systemPrompt": system_prompt,
        "temperature": temperature,
        "stopSequences": None if stop_sequences is None else list(stop_sequences),
        "modelPreferences": None if model_hints is None else {"hints": [{"name": hint} for hint in model_hints]},
    }
    given = {name: value for name, value in options.items() if value is not None}
    return _question("sample", {"messages": list(messages), "maxTokens": max_tokens, **given}, name)


class _SampleAnswer(msgspec.Struct, rename="camel"):
    content: Any
    model: str = ""
    stop_reason: str | None = None


def _read_sampled(reply: IoReply) -> Sampled:
    answer = msgspec.json.decode(reply.result, type=_SampleAnswer)
    blocks = answer.content if isinstance(answer.content, list) else [answer.content]
    texts = [block.get("text", "") for block in blocks if isinstance(block, dict) and block.get("type") == "text"]
    return Sampled("".join(texts), answer.content, answer.model, answer.stop_reason or "")


# --- roots --------------------------------------------------------------------------------------------------------


def list_roots(*, name: str | None = None) -> list[Root]:
    """The folders and files that the client says it works on. They are names: nothing of them can be read from here."""
    return _question("list_roots", {}, name).ask(_read_roots)


async def alist_roots(*, name: str | None = None) -> list[Root]:
    """As `list_roots`, awaited."""
    return await _question("list_roots", {}, name).aask(_read_roots)


class _RootsAnswer(msgspec.Struct):
    roots: list[Root] = []


def _read_roots(reply: IoReply) -> list[Root]:
    return msgspec.json.decode(reply.result, type=_RootsAnswer).roots
