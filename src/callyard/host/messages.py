"""Messages: JSON on the way, typed at both ends. A handler says what it takes by the annotation of its last parameter.

A message goes by the name of its class; plain values (dict, list, text, numbers, None) have no name. What decodes a
payload is the type that the receiving handler declares, so nothing that comes in chooses a class.
Source: job-queue §2.3.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import msgspec.inspect

from callyard.host.errors import HostError, HostErrorKind

F = TypeVar("F", bound=Callable[..., Any])

JSON: Final = "json"
"""The one content type that is known."""
ANY: Final = "*"
"""The route of whatever no other handler takes."""
_PLAIN: Final = frozenset({dict, list, tuple, str, int, float, bool, type(None)})
_UNIONS: Final = (Union, UnionType)
_MARK: Final = "__callyard_handler__"
_encode: Final = msgspec.json.Encoder().encode


class Route(NamedTuple):
    """One handler, for one type of message."""

    decode: Callable[[bytes], Any]
    """Raises `msgspec.DecodeError`."""
    function: Callable[..., Any]
    takes_state: bool
    """A method: the spot's object comes first."""
    takes_turn: bool


Routes = dict[str, Route]
"""By the name of the message type, or ANY."""


def name_of(message_class: type) -> str:
    """What messages of a class are called; "": they are plain values."""
    return "" if message_class in _PLAIN else message_class.__name__


def shown_name(name: str) -> str:
    """Of a message type, or of what goes without one."""
    return {"": "plain values", ANY: "anything else"}.get(name, name)


def encode(value: Any) -> bytes:
    """Raises `HostError(TYPE_MISMATCH)` for what JSON cannot hold."""
    try:
        return _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(value, type):
            text = f"the class {value.__name__} cannot be sent as JSON: send one of it, {value.__name__}(...)"
        else:
            text = (
                f"{type(value).__name__} cannot be sent as JSON: {error}. What is sent is a Struct, a dataclass or a "
                "plain value"
            )
        raise HostError(HostErrorKind.TYPE_MISMATCH, text) from None


def decode_reply(payload: bytes, reply_type: Any, spot: str) -> Any:
    """Raises `HostError(PROTOCOL_ERROR)`; TYPE_MISMATCH for what is no type of a reply."""
    try:
        return msgspec.json.decode(payload, type=reply_type)
    except msgspec.DecodeError as error:
        shown = getattr(reply_type, "__name__", reply_type)
        raise HostError(HostErrorKind.PROTOCOL_ERROR, f"the reply of {spot!r} is no {shown}: {error}") from None
    except TypeError as error:
        raise HostError(HostErrorKind.TYPE_MISMATCH, f"no reply can be read as {reply_type!r}: {error}") from None


def find_route(routes: Routes, name: str) -> Route | None:
    return routes.get(name) or routes.get(ANY)


def mark(function: F, message_type: Any) -> F:
    """Note that a method is a handler; `message_type` None: its annotation says of what."""
    setattr(function, _MARK, (message_type,))
    return function


def read_handler(function: Callable[..., Any], message_type: Any = None, *, takes_state: bool = False) -> Routes:
    """The route to a function `f(message)` or `f(turn, message)`; of a class's, `self` comes before.

    Raises ValueError for another shape, and where no type can be read.
    """
    label = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise ValueError(f"a handler is a function, got {label}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{label} is a generator: calling it would run nothing, and a handler's value is one message")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    found = [each for each in parameters if each.kind in positional]
    needed = [each for each in found if each.default is inspect.Parameter.empty][int(takes_state) :]
    others = [
        each
        for each in parameters
        if each.kind is inspect.Parameter.KEYWORD_ONLY and each.default is inspect.Parameter.empty
    ]
    if len(needed) not in (1, 2) or others:
        raise ValueError(
            f"a handler takes (message) or (turn, message), {label} takes {[each.name for each in needed + others]}"
        )
    if message_type is None:
        message_type = _annotated_type(function, needed[-1].name, label)
    takes_turn = len(needed) == 2
    return {
        name: Route(decode, function, takes_state, takes_turn)
        for name, decode in _decoders(message_type, label).items()
    }


def read_object(kind: type) -> Routes:
    """The routes to the methods of a class that are marked. Raises ValueError when two of them take one type."""
    routes: Routes = {}
    for attribute in dir(kind):
        function = inspect.getattr_static(kind, attribute)
        marked = getattr(function, _MARK, None)
        if marked is None:
            continue
        for name, route in read_handler(function, marked[0], takes_state=True).items():
            if name in routes:
                other = routes[name].function.__qualname__
                both = f"{other} and {function.__qualname__}"
                if name:
                    raise ValueError(f"{name} has two handlers: {both}")
                raise ValueError(
                    f"plain values have two handlers: {both}. They go without a name, so one handler takes them all, "
                    "as of `int | str`; or send a Struct"
                )
            routes[name] = route
    return routes


def _annotated_type(function: Callable[..., Any], parameter: str, label: str) -> Any:
    try:
        return get_type_hints(function).get(parameter, Any)
    except (NameError, TypeError) as error:
        raise ValueError(
            f"the type of {label}'s {parameter!r} cannot be read ({error}): name it, as in @host.on(pattern, AddItem)"
        ) from None


def _decoders(message_type: Any, label: str) -> dict[str, Callable[[bytes], Any]]:
    """By the names that messages of a type go by. Raises ValueError for one that JSON does not give."""
    if message_type in (Any, object):
        return {ANY: msgspec.json.Decoder().decode}
    members: dict[str, list[Any]] = {}
    for member in _members(message_type):
        origin = _class_of(member)
        is_class = isinstance(origin, type) and origin not in _PLAIN
        members.setdefault(origin.__name__ if is_class else "", []).append(member)
    decoders: dict[str, Callable[[bytes], Any]] = {}
    for name, types in members.items():
        try:
            shown = msgspec.inspect.type_info(read := Union[tuple(types)])  # noqa: UP007 - of so many as there are
            if isinstance(shown, msgspec.inspect.CustomType):
                raise TypeError(f"{name} is no Struct, no dataclass and no plain value")
            decoders[name] = msgspec.json.Decoder(read).decode
        except TypeError as error:
            raise ValueError(f"{label} cannot take {message_type}: {error}") from None
    return decoders


def _members(message_type: Any) -> list[Any]:
    if get_origin(message_type) in _UNIONS:
        return [member for each in get_args(message_type) for member in _members(each)]
    return [type(None) if message_type is None else message_type]


def _class_of(member: Any) -> Any:
    if get_origin(member) is Annotated:
        return _class_of(get_args(member)[0])
    return get_origin(member) or member
