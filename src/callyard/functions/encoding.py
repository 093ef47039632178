"""Python values to JSON, with no silent loss.

msgspec encodes; this module adds the types it does not know (pydantic models, numpy, paths, subclasses) and refuses
what JSON cannot hold, with a JSON Pointer to the place: NaN and infinities (msgspec alone writes null), lone
surrogates, cycles, more than `LEVELS_MAX` levels, keys that are neither text nor number. Keys that msgspec writes as
text (dates, UUIDs, enums of text) are taken. An array is lists, a table its rows; where both ends are Python they
travel as they are instead (`packing`). Source: tool-dispatch D26.

The fast path looks only at the bytes; the value itself is walked when they leave a doubt (a `null`, many brackets) or
when the encoder refused, to find the place. numpy and pydantic are used when the user's code has loaded them, never
imported.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import datetime
import decimal
import enum
import functools
import inspect
import itertools
import math
import pathlib
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, Literal

import msgspec

from callyard.errors import CallyardError
from callyard.functions import foreign
from callyard.functions.shared import Shared

LEVELS_MAX: Final = 512
_TEXT_SHOWN: Final = 60
_HEAD_BYTES: Final = 1024

_PLAIN: Final = frozenset({str, int, bool, type(None)})
_NATIVE_LEAVES: Final = (
    *(bytes, bytearray, memoryview, decimal.Decimal, uuid.UUID, msgspec.Raw),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
)
_DULL: Final = frozenset({*_PLAIN, float, *_NATIVE_LEAVES} - {bytes, bytearray, memoryview})
"""Types of leaves that `kinds_within` leaves out."""
_SERIES: Final = (Set, Sequence, collections.deque, collections.abc.ValuesView)
"""What is an array in JSON, besides lists and tuples."""
_NATIVE_KEYS: Final = (str, int, float, bytes, decimal.Decimal, enum.Enum, uuid.UUID, *_NATIVE_LEAVES[-4:])


class ResultMisfit(CallyardError):
    """A value that JSON cannot hold. `details` carries `pointer` and, by case, `type`, `size`, `limit`, `head`."""

    def __init__(self, message: str, details: dict[str, Any]) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class _Unsupported(Exception):
    """The encoder met a type it has no JSON for; caught in this module."""


class Lifted:
    """An array, a table or a Shared, as `to_plain` leaves it. No Struct: msgspec would look into it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def encode_value(value: object, *, nan_null: bool = False, kinds: Set[type] | None = None) -> bytes:
    """JSON of any supported value, dictionaries in their own order. `nan_null`: NaN and infinities are null.

    Sets are sorted: their own order differs from process to process (call-execution X88). `kinds`: by `kinds_within`,
    for whoever has them already. Raises `ResultMisfit`.
    """
    output = _encode(_ENCODER, value, nan_null)
    if b"[" not in output or not _has_set(kinds_within(value) if kinds is None else kinds):
        return output
    try:
        return _ENCODER.encode(_with_sorted_sets(value, _to_sorted_json))
    except RecursionError:
        return _SORTED.encode(value)


def encode_flat(value: Any, *, canonical: bool) -> bytes | None:
    """JSON as `encode_canonical` or `encode_value` makes it, fast, of a plain container of plain leaves, as most
    arguments and results are. None: that is no such value, or one that they may refuse."""
    kind = type(value)
    kinds = set(map(type, value.values() if kind is dict else value if kind is list or kind is tuple else (value,)))
    if not kinds <= _DULL:
        return None
    try:
        output = (_CANONICAL if canonical else _ENCODER).encode(value)
    except Exception:  # noqa: BLE001 - those say why
        return None
    return None if float in kinds and b"null" in output else output


def encode_canonical(value: object, *, nan_null: bool = False) -> bytes:
    """JSON of arguments, in which equal values are equal bytes: keys and sets are sorted. Models are by their aliases,
    by which they are read. Raises `ResultMisfit`. Source: X15."""
    return _encode(_CANONICAL, value, nan_null)


def to_plain(value: object, *, canonical: bool, kinds: Set[type]) -> Any:
    """What the encoders see of a value, as dicts, lists and leaves, but with bytes as they are and each array and
    table as a `Lifted`. Sets are sorted. `kinds`: by `kinds_within`. Raises what the encoders raise: `explain_refusal`
    makes a `ResultMisfit` of it."""
    if not canonical and _has_set(kinds):
        value = _with_sorted_sets(value, functools.partial(_to_builtins, hook=_to_liftable, order="deterministic"))
    hook = _to_liftable_argument if canonical else _to_liftable
    return _to_builtins(value, hook, "deterministic" if canonical else None)


def _to_builtins(value: object, hook: Callable[[Any], Any], order: Literal["deterministic"] | None) -> Any:
    kept = (bytes, bytearray, memoryview, Lifted)
    return msgspec.to_builtins(value, builtin_types=kept, enc_hook=hook, str_keys=True, order=order)


def encode_table_row(row: Mapping[str, object]) -> bytes:
    """JSON of a row of a table. NaN and infinities are null: so frames leave a cell empty. Raises `ResultMisfit`."""
    try:
        return _ENCODER.encode(row)
    except MemoryError:
        raise
    except Exception as error:
        raise explain_refusal(row, error) from error


def check_size(output: bytes, bytes_max: int) -> bytes:
    """`output`, a result, unless it is larger than `bytes_max`. Raises `ResultMisfit` with its first KiB."""
    if len(output) > bytes_max:
        size = len(output)
        message = f"result of {size} bytes exceeds max_result_bytes={bytes_max}: return less, or write it to a file"
        head = output[:_HEAD_BYTES].decode(errors="replace")
        raise ResultMisfit(message, {"pointer": "", "size": size, "limit": bytes_max, "head": head})
    return output


def is_deeper_than(output: bytes, levels: int) -> bool:
    """Whether a JSON text nests deeper than `levels`. Linear, and in C."""
    if len(output) <= levels or output.count(b"[") + output.count(b"{") <= levels:
        return False
    brackets = _JSON_TEXT.sub(b"", output).translate(None, _NOT_BRACKETS)
    return max(itertools.accumulate(map(_STEP_BY_BYTE.__getitem__, brackets)), default=0) > levels


def escape_token(token: str | int) -> str:
    """One part of a JSON Pointer."""
    return str(token).replace("~", "~0").replace("/", "~1")


def to_pointer(place: Iterable[str | int]) -> str:
    """JSON Pointer of the keys and positions on the way to a place."""
    return "".join(f"/{escape_token(token)}" for token in place)


def describe_value(value: object) -> str:
    """What came, in words and cut short: `a number (5)`, `text ("JFK")`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"a boolean ({str(value).lower()})"
    if isinstance(value, int | float):
        try:
            text = str(value)
        except ValueError:  # more digits than this Python turns into text
            return "a number of thousands of digits"
        return f"a number ({_shorten(text)})"
    if isinstance(value, str):
        return f"text ({_shorten(value)!r})".replace("'", '"')
    if isinstance(value, list | tuple):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    return f"a {type(value).__name__}"


def find_misfit(value: object) -> ResultMisfit | None:
    """Walk `value` as the encoder does and return the first thing JSON cannot hold, with its place."""
    tokens: list[str | int | None] = []
    active: set[int] = set()
    open_levels: list[tuple[int, Iterator[tuple[str | int | None, object]]]] = [(0, iter([(None, value)]))]
    while open_levels:
        owner, children = open_levels[-1]
        try:
            token, child = next(children)
        except StopIteration:
            open_levels.pop()
            active.discard(owner)
            if tokens:
                tokens.pop()
            continue
        pointer = [*tokens, token]
        try:
            inner = _children(child)
        except _Unsupported as problem:
            return _misfit(str(problem), pointer, child)
        if inner is None:
            continue
        if id(child) in active:
            return _misfit("the value holds itself: JSON has no cycles", pointer, child)
        if len(open_levels) > LEVELS_MAX:
            return _misfit(f"more than {LEVELS_MAX} levels", pointer[:8], child)
        active.add(id(child))
        tokens.append(token)
        open_levels.append((id(child), inner))
    return None


def find_non_finite(value: object) -> str | None:
    """JSON Pointer to the first NaN or infinity in a decoded or validated value; None: there is none."""
    if isinstance(value, float):
        return None if math.isfinite(value) else ""
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        parts = enumerate(value)
    else:
        parts = named_parts(value)
    for token, part in parts:
        if type(part) in _PLAIN:
            continue
        below = find_non_finite(part)
        if below is not None:
            return f"/{escape_token(token)}{below}"
    return None


def _encode(encoder: msgspec.json.Encoder, value: object, nan_null: bool) -> bytes:
    try:
        output = encoder.encode(value)
    except MemoryError:
        raise
    except Exception as error:
        raise explain_refusal(value, error) from error
    if not nan_null and b"null" in output and value is not None and _may_hold_non_finite(value):
        misfit = find_misfit(value)
        if misfit is not None:
            raise misfit
    if is_deeper_than(output, LEVELS_MAX):
        raise _misfit(f"more than {LEVELS_MAX} levels", [], value)
    return output


def explain_refusal(value: object, error: Exception) -> ResultMisfit:
    """Where and why an encoder refused `value`, having raised `error`."""
    try:
        misfit = find_misfit(value)
    except Exception as second:  # noqa: BLE001 - code of the value itself: a property, a serializer
        misfit = None
        error = second
    return misfit or _misfit(f"encoding it raised {type(error).__name__}: {_safe_text(error)}", [], value)


def misfit_at(problem: str, at: Iterable[str | int], value: object) -> ResultMisfit:
    """The misfit of one value within another."""
    return _misfit(problem, [*at], value)


def _misfit(problem: str, tokens: Sequence[str | int | None], value: object) -> ResultMisfit:
    pointer = "".join(f"/{escape_token(token)}" for token in tokens if token is not None)
    message = f"{pointer}: {problem}" if pointer else problem
    return ResultMisfit(message, {"pointer": pointer, "type": type_name(value)})


def _children(value: Any) -> Iterator[tuple[str | int | None, object]] | None:
    """The parts of a container with their tokens (None: the same place); None: a leaf. Raises `_Unsupported`."""
    kind = type(value)
    if kind is str:
        _check_text(value)
        return None
    if kind in _PLAIN:
        return None
    if kind is float:
        if not math.isfinite(value):
            raise _Unsupported(f"{value} is not JSON: use None, or text, instead; nan='null' makes it null")
        return None
    if isinstance(value, dict):
        return _dict_children(value)
    if isinstance(value, list | tuple | set | frozenset):
        return enumerate(value)
    if isinstance(value, enum.Enum):
        return iter([(None, value.value)])
    if kind in _NATIVE_LEAVES:
        return None
    if hasattr(kind, "__struct_fields__"):
        names = zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
        return iter([(shown, getattr(value, name)) for shown, name in names])
    if dataclasses.is_dataclass(value) or hasattr(kind, "__attrs_attrs__"):
        return iter(list(named_parts(value)))
    return iter([(None, _to_encodable(value))])


def _dict_children(value: dict[Any, Any]) -> Iterator[tuple[str | int | None, object]]:
    parts: list[tuple[str | int | None, object]] = []
    for key, part in value.items():
        if isinstance(key, str):
            _check_text(key)
        elif isinstance(key, bool) or not isinstance(key, _NATIVE_KEYS):
            plain = _to_encodable(key)
            if isinstance(plain, bool) or not isinstance(plain, _NATIVE_KEYS):
                raise _Unsupported(_BAD_KEY + type_name(key))
        parts.append((key if isinstance(key, str) else str(key), part))
    return iter(parts)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Unsupported(
            f"text with a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}) is not Unicode:"
            ' decode the bytes with errors="replace"'
        ) from error


def named_parts(value: Any) -> Iterator[tuple[str, object]]:
    """Fields of a dataclass, Struct, model or attrs object; none of anything else."""
    names = getattr(type(value), "__struct_fields__", None)
    if names is None and dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    if names is None and hasattr(type(value), "__attrs_attrs__"):
        names = [field.name for field in type(value).__attrs_attrs__]
    if names is None and hasattr(type(value), "__pydantic_serializer__"):
        names = list(vars(value))
    for name in names or ():
        if hasattr(value, name):
            yield name, getattr(value, name)


def kinds_within(value: Any) -> set[type]:
    """Types of all that stands in a value, but for plain leaves, dicts, lists and tuples. One look for all questions.

    No recursion, and each container once: a value may be deep, or hold itself. Below `LEVELS_MAX` nobody looks, since
    the encoders refuse it. Raises what the value's own code does.
    """
    kinds: set[type] = set()
    if type(value) in _DULL:
        return kinds
    seen: dict[int, object] = {}
    """By id, and kept until the end, so that no other gets it."""
    level: list[Any] = [value]
    for _ in range(LEVELS_MAX + 1):
        below: list[Any] = []
        for owner in level:
            kind = type(owner)
            parts: Iterable[object]
            if kind is dict:
                parts = owner.values()
            elif kind is list or kind is tuple:
                parts = owner
            else:
                kinds.add(kind)
                parts = _parts_of(owner)
            if not _DULL.issuperset(map(type, parts)) and id(owner) not in seen:
                seen[id(owner)] = owner
                below += [part for part in parts if type(part) not in _DULL]
        if not below:
            break
        level = below
    return kinds


def _parts_of(value: Any) -> Iterable[object]:
    """What stands in a value that is no plain container, as the encoders see it."""
    if type(value) in _NATIVE_LEAVES or isinstance(value, str | bytes):
        return ()
    parts = [part for _, part in named_parts(value)]
    if parts:
        return parts
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, _SERIES) else ()


def _has_set(kinds: Set[type]) -> bool:
    return any(issubclass(kind, Set) for kind in kinds)


def _with_sorted_sets(value: object, write: Callable[[object], object]) -> object:
    """The same for the encoder. What holds a set and is no plain container becomes what `write` makes of it, sorted."""
    if not _has_set(kinds_within(value)):
        return value
    if type(value) is dict:
        return {key: _with_sorted_sets(part, write) for key, part in value.items()}
    if type(value) is list or type(value) is tuple:
        return [_with_sorted_sets(part, write) for part in value]
    try:
        return write(value)
    except TypeError:  # parts that have no order of their own, such as None beside True
        if not isinstance(value, Set):
            return value
        return sorted(value, key=_ENCODER.encode)


def _to_sorted_json(value: object) -> object:
    return msgspec.Raw(_SORTED.encode(value))


def _may_hold_non_finite(value: Any) -> bool:
    """Cheap first look: False only when there is certainly no NaN or infinity in `value`."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    if kind is float:
        return not math.isfinite(value)
    parts: Iterable[Any]
    if kind is dict:
        parts = value.values()
    elif kind is list or kind is tuple:
        parts = value
    elif dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
        parts = vars(value).values()
    else:
        return True
    try:
        for part in parts:
            kind = type(part)
            if kind in _PLAIN:
                continue
            if kind is float:
                if not math.isfinite(part):
                    return True
            elif _may_hold_non_finite(part):
                return True
    except RecursionError:
        return True
    return False


def _to_liftable(value: Any) -> Any:
    """The hook of `to_plain`."""
    if type(value) is Shared or foreign.library_of(value) is not None:
        return Lifted(value)
    return bytes(value) if isinstance(value, bytes) else _to_encodable(value)


def _to_liftable_argument(value: Any) -> Any:
    """The same for arguments."""
    return _to_argument(value) if is_model(value) else _to_liftable(value)


_NOT_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")
_JSON_TEXT: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_STEP_BY_BYTE: Final = [(byte in b"[{") - (byte in b"]}") for byte in range(256)]


def _to_encodable(value: Any) -> Any:
    """The encoder's hook for types it does not know. Raises `_Unsupported` with what to return instead."""
    kind = type(value)
    if kind in _NEVER_KEYS:  # as values these never come here
        raise _Unsupported(_BAD_KEY + type_name(value))
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):  # subclasses, such as pandas.Timestamp
        if value != value:  # pandas.NaT is a datetime that equals nothing
            raise _Unsupported("NaT is not JSON: use None instead")
        return value.isoformat()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        return _numpy_to_encodable(numpy, value)
    library = foreign.library_of(value)
    if library is not None:
        try:
            return foreign.frame_rows(value, library)
        except foreign.NotCrossing as error:
            raise _Unsupported(str(error)) from error
    if isinstance(value, str):
        return str.__str__(value)
    for plain in _SUBCLASSED:
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, datetime.timedelta):
        return datetime.timedelta(days=value.days, seconds=value.seconds, microseconds=value.microseconds)
    if isinstance(value, pathlib.PurePath | uuid.UUID):
        return str(value)
    if is_model(value):
        return value.model_dump()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return set(value)
    if isinstance(value, _SERIES):
        return list(value)
    advice = _advice(value)
    if not advice:
        return _by_pydantic(value)
    raise _Unsupported(f"{type_name(value)} has no JSON form: {advice}")


def is_model(value: object) -> bool:
    """Whether it is a pydantic model."""
    return hasattr(type(value), "__pydantic_serializer__") and hasattr(type(value), "model_dump")


def _to_argument(value: Any) -> Any:
    """The hook for arguments: a model leaves as it is read, by its aliases; a result by the names of its fields."""
    kind: Any = type(value)
    return value.model_dump(by_alias=_is_read_by_alias(kind)) if is_model(value) else _to_encodable(value)


@functools.lru_cache(maxsize=1_024)
def _is_read_by_alias(kind: Any) -> bool:
    """Not where a field, of the model or of one in it, is written by another name than it is read."""
    left, has_alias = [getattr(kind, "__pydantic_core_schema__", None)], False
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            written, read = node.get("serialization_alias"), node.get("validation_alias")
            if written != read:
                return False
            has_alias = has_alias or written is not None
            left += node.values()
        elif isinstance(node, list | tuple):
            left += node
    return has_alias


_NEVER_KEYS: Final = (bool, type(None), tuple, frozenset)
_SUBCLASSED: Final[tuple[Any, ...]] = (int, float, bytes, decimal.Decimal)
_BAD_KEY: Final = "a key must be text or a number, got "
_ADVICE: Final = "use a dict, list, text, number, dataclass, Struct or pydantic model instead"


def _advice(value: object) -> str:
    own = getattr(type(value), "__callyard_advice__", "")
    if own:
        return str(own)
    if isinstance(value, complex):
        return "use [z.real, z.imag] instead"
    if inspect.isawaitable(value):
        return "await it, in an async def, and use what it gives"
    if type(value).__name__ == "RecordBatchReader":
        return "use reader.read_all(), a pyarrow.Table, instead"
    if isinstance(value, collections.abc.Iterator):
        return "use list(...) of it instead"
    if isinstance(value, BaseException):
        return "raise it, or use its text, instead"
    if callable(value):
        return "call it and use what it gives"
    if type(value).__name__ in {"LazyFrame", "DataFrame", "Series", "ChunkedArray", "RecordBatch"}:
        return "use a DataFrame, a pyarrow.Table or a list instead, such as lazy.collect() or series.to_list()"
    if type(value).__name__ == "NAType":
        return "use None instead"
    if type(value).__module__ == "pyarrow.lib":
        return "use array.to_pylist(), scalar.as_py() or a pyarrow.Table instead"
    return ""


def _by_pydantic(value: object) -> Any:
    """Types that only pydantic knows: URLs, IP addresses, secrets, patterns."""
    core = sys.modules.get("pydantic_core")
    if core is not None:
        try:
            return core.to_jsonable_python(value)
        except core.PydanticSerializationError:
            pass
    raise _Unsupported(f"{type_name(value)} has no JSON form: {_ADVICE}")


def _numpy_to_encodable(numpy: Any, value: Any) -> Any:
    if value.dtype.kind == "M":
        if numpy.isnat(value).any():
            raise _Unsupported("NaT is not JSON: use None instead")
        texts = numpy.datetime_as_string(value)
        return texts.tolist() if isinstance(value, numpy.ndarray) else str(texts)
    if value.dtype.kind == "m":
        return _duration_to_encodable(numpy, value)
    if isinstance(value, numpy.ndarray):
        return value.astype(float).tolist() if value.dtype.char == "g" else value.tolist()
    if isinstance(value, numpy.floating):
        return float(value)
    plain = value.item()
    if type(plain) is type(value):
        raise _Unsupported(f"{type_name(value)} has no JSON form: {_ADVICE}")
    return plain


def _duration_to_encodable(numpy: Any, value: Any) -> Any:
    """As durations: numpy itself gives those of nanoseconds, months and years as bare numbers."""
    if numpy.isnat(value).any():
        raise _Unsupported("NaT is not JSON: use None instead")
    short = value
    if numpy.datetime_data(value.dtype)[0] not in _DURATIONS:
        try:
            short = value.astype("m8[us]", casting="same_kind")
        except TypeError:
            raise _Unsupported(f"{value.dtype} has no JSON form: no month has a length of its own") from None
        if (short != value).any():
            raise _Unsupported(f"{value.dtype} has no JSON form: a duration in JSON is of whole microseconds")
    return short.tolist() if isinstance(value, numpy.ndarray) else short.item()


_DURATIONS: Final = frozenset({"W", "D", "h", "m", "s", "ms", "us"})
"""Units of durations that Python has too."""


def type_name(value: object) -> str:
    """The type of a value, as one would write it: `int`, `decimal.Decimal`."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _safe_text(error: BaseException) -> str:
    try:
        return _shorten(str(error), 200)
    except Exception:  # noqa: BLE001 - __str__ is user code
        return "(its text cannot be read)"


def _shorten(text: str, limit: int = _TEXT_SHOWN) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_to_encodable)
_SORTED: Final = msgspec.json.Encoder(enc_hook=_to_encodable, order="deterministic")
_CANONICAL: Final = msgspec.json.Encoder(enc_hook=_to_argument, order="deterministic")
