"""The check of a call's arguments before anything else is done for it, and of its result after.

Three ways, one form of answer. A tool with a raw schema is checked by that schema. A function that was described is
filtered by its described schema; its executor has the last word. A function of this process whose signature runs no
code of the user's is bound at once, which is exact, and the bound values serve the first attempt; one that does run
some (validators, `__post_init__`) is filtered, and bound at the attempt. Source: tool-dispatch D4, D5, D6, D26, D49.

pydantic and jsonschema_rs are imported when they are first needed: the worker's process starts without them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from callyard.functions.contents import encode_result
from callyard.functions.encoding import ResultMisfit, check_size, describe_value, is_deeper_than
from callyard.functions.function import RESULT_BYTES_MAX, Promises
from callyard.functions.misfits import ArgumentsMisfit, misfit
from callyard.functions.strict_json import (
    ARGUMENTS_LEVELS_MAX,
    check_bounds,
    decode_json,
    encode_arguments,
)

if TYPE_CHECKING:
    from callyard.functions.json_schema import JsonSchema
    from callyard.functions.repairs import Repair
    from callyard.functions.signature import Invocable

Bound = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments for a Python function: by position and by name."""

_UNSET: Final = object()
_PLAIN: Final = frozenset({int, str, bool, type(None)})
"""Not float: NaN has no JSON."""
_PLAIN_MAX: Final = 1 << 63
_SURE_BYTES_MAX: Final = 256
"""No integer of so few digits is too large for a float."""
_ENCODE: Final = msgspec.json.Encoder().encode


class CheckedArguments(msgspec.Struct):
    """Arguments that passed the check. Owned by one call."""

    raw: bytes
    """JSON of an object, with the repairs made."""
    repairs: tuple[Repair, ...] = ()
    bound: Bound | None = None
    """What the check itself has bound; taken by the first attempt (`LocalHandler.bind`)."""
    decoded: Any = _UNSET

    @property
    def value(self) -> dict[str, Any]:
        """Plain JSON values. Decoded once: whoever changes it changes it for all readers of this call."""
        if self.decoded is _UNSET:
            self.decoded = decode_json(self.raw)
        value: dict[str, Any] = self.decoded
        return value


class LocalHandler:
    """What runs a tool in this process."""

    def __init__(self, target: Callable[..., Any], promises: Promises, *, invocable: Invocable | None = None) -> None:
        """`invocable`: of `target`'s signature; None: `target` takes one dict, the arguments."""
        self.target = target
        self.invocable = invocable
        self.is_async = _is_async(target)
        asked = promises.isolation
        self.in_thread = asked == "thread" or (asked != "inline" and not self.is_async)
        """It would hold up the loop (D50)."""
        self.plain_result: type | None = None if invocable is None else invocable.plain_result
        """A result of just this type fits the output schema."""
        self._result_bytes_max = promises.max_result_bytes or RESULT_BYTES_MAX
        self._is_plain = invocable is None or not invocable.takes_texts
        """A plain result is its own JSON: prompts and resources have a form of theirs."""

    def bind(self, checked: CheckedArguments) -> Bound:
        """Positional and keyword arguments for one attempt, not shared with any other. May run validators of the
        user's. Raises `ArgumentsMisfit`: the call has not run."""
        bound, checked.bound = checked.bound, None
        if bound is not None:
            return bound
        if self.invocable is not None:
            return self.invocable.bind(checked.raw)
        return (decode_json(checked.raw),), {}

    def encode(self, value: object) -> bytes:
        """The result as JSON. Raises `ResultMisfit`."""
        if self._is_plain and (
            value is None or type(value) is bool or (type(value) is int and -_PLAIN_MAX < value < _PLAIN_MAX)
        ):
            return _ENCODE(value)  # nothing about these can be wrong
        if self.invocable is not None:
            return self.invocable.encode(value)
        return encode_result(value, self._result_bytes_max)


class Checker:
    """Checks the arguments of one tool. It never runs code of the user's."""

    def __init__(
        self,
        *,
        schema: Callable[[], JsonSchema | None],
        invocable: Invocable | None = None,
    ) -> None:
        """`schema` compiles the schema of the arguments when it is first asked for; None: there is nothing to check by.

        `invocable`: its verdict is taken at once, so it must run no code of the user's.
        """
        self._compile = schema
        self._invocable = invocable
        self._bind_sure = None if invocable is None else invocable.bind_sure

    @functools.cached_property
    def schema(self) -> JsonSchema | None:
        return self._compile()

    def check(self, args: bytes | Mapping[str, Any], *, repair: bool = False) -> CheckedArguments:
        """Raises `ArgumentsMisfit` with every error."""
        if type(args) is dict and (bind_sure := self._bind_sure) is not None:
            for name, value in args.items():
                if type(name) is not str or type(value) not in _PLAIN:
                    break
            else:  # most calls have a few plain values, that fit: else look closer
                try:
                    raw = _ENCODE(args)
                    if len(raw) <= _SURE_BYTES_MAX:
                        return CheckedArguments(raw, (), bind_sure(raw))
                except ValueError:  # pydantic's and msgspec's errors, and text that UTF-8 cannot hold
                    pass
        raw = args if type(args) is bytes else encode_arguments(args) if type(args) is dict else _to_raw(args)
        if len(raw) > ARGUMENTS_LEVELS_MAX:
            check_bounds(raw)
        if raw[:1] != b"{" and raw.lstrip()[:1] != b"{":
            _refuse(raw)
        try:
            if self._invocable is not None:
                return CheckedArguments(raw, (), self._invocable.bind(raw))
            return self._filter(raw, ())
        except ArgumentsMisfit:
            if not repair or self.schema is None:
                raise
        from callyard.functions.repairs import repair_arguments

        repaired, repairs = repair_arguments(self.schema, raw)
        if self._invocable is not None:
            return CheckedArguments(repaired, repairs, self._invocable.bind(repaired))
        return self._filter(repaired, repairs)

    def _filter(self, raw: bytes, repairs: tuple[Repair, ...]) -> CheckedArguments:
        value = decode_json(raw)
        if self.schema is not None:
            self.schema.check(value)
        return CheckedArguments(raw, repairs, None, value)


def check_result(schema: JsonSchema | None, output: bytes, bytes_max: int) -> None:
    """Raises `ResultMisfit` for JSON that is too large, or not what `schema` says."""
    check_size(output, bytes_max)
    if schema is None:
        return
    try:
        # The strict parser takes fewer levels than a result may have.
        deep = is_deeper_than(output, ARGUMENTS_LEVELS_MAX)
        schema.check(msgspec.json.decode(output) if deep else decode_json(output))
    except ArgumentsMisfit as error:
        from callyard.functions.contents import read_contents

        if read_contents(output) is not None:  # contents inside a value: they are what they are, whatever it said
            return
        message = f"the result is not what its output schema says: {error.message}"
        raise ResultMisfit(message, error.details) from None


def compile_described(raw: bytes | msgspec.Raw) -> JsonSchema | None:
    """The filter of a described schema. None: it says nothing, or nothing that can be checked here.

    The executor that described it has the last word, so what this side cannot compile is no reason to refuse a call.
    """
    from callyard.functions import described
    from callyard.functions.json_schema import BadSchema, JsonSchema
    from callyard.functions.schema_text import to_plain

    try:
        loose = described.loosen(to_plain(msgspec.Raw(bytes(raw))))
        if not isinstance(loose, dict) or not loose:
            return None
        return JsonSchema.described(loose, described.formats(), described.KEYWORDS)
    except BadSchema:
        return None


def compile_own(raw: bytes | msgspec.Raw) -> JsonSchema | None:
    """The filter of a schema that a described function brought itself. None: as of `compile_described`."""
    from callyard.functions.json_schema import BadSchema, JsonSchema

    try:
        return JsonSchema(msgspec.json.decode(raw))
    except (BadSchema, msgspec.DecodeError):
        return None


def _to_raw(args: bytes | Mapping[str, Any]) -> bytes:
    if type(args) is dict or isinstance(args, Mapping):
        return encode_arguments(args)
    if isinstance(args, bytes | bytearray | memoryview | msgspec.Raw):
        return bytes(args)
    raise misfit(f"expected an object of arguments by name, got {type(args).__name__}", "type", expected="an object")


def _refuse(raw: bytes) -> None:
    """For JSON that is no object. Raises `ArgumentsMisfit`."""
    value = decode_json(raw)
    raise misfit(f"expected an object of arguments by name, got {describe_value(value)}", "type", expected="an object")


def _is_async(target: Callable[..., Any]) -> bool:
    plain = inspect.unwrap(target)
    while isinstance(plain, functools.partial):
        plain = plain.func
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(type(plain), "__call__", None))  # noqa: B004
