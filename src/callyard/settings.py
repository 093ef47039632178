"""What a setting is: said once, at the field that holds it, and read the same way wherever it can be given.

    start_timeout_ms: int = setting(60_000, "time to import the functions' file", low=100, high=DAY_MS)

    Worker(…, start_timeout_ms=2_000)         the value itself
    CALLYARD_START_TIMEOUT_MS=2s              text, by `Setting.parse`: variables and `--set`
    start_timeout = "2s"                      TOML, by `Setting.read`

The unit is in the name: `_ms` is a duration, `_bytes` a size. Outside of Python a name may be written without its unit,
and a value with one. Source: call-execution X73.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from datetime import date, time
from enum import StrEnum
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from callyard.errors import UsageError
from callyard.quantities import read_duration_ms, read_size_bytes

T = TypeVar("T")
DAY_MS: Final = 24 * 3_600_000
TEXT_CHARACTERS_MAX: Final = 4_096
_DIGITS_MAX: Final = 18
_SUGGESTED_MAX: Final = 2
_LISTED_MAX: Final = 20
_SHOWN_MAX: Final = 5
"""Of more settings than that."""
_AMOUNT_MAX: Final = 10.0**_DIGITS_MAX
_UNIT: Final = re.compile(r"_(ms|bytes)(?=_|$)")
_DURATIONS: Final = (("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))
_SIZES: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_FLAGS: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}


class Kind(StrEnum):
    NUMBER = "number"
    DURATION = "duration"
    SIZE = "size"
    FLAG = "flag"
    CHOICE = "choice"
    TEXT = "text"
    LIST = "list"
    TABLE = "table"


_EXPECTED: Final[Mapping[Kind, str]] = {
    Kind.NUMBER: "a whole number",
    Kind.DURATION: "a duration such as 500ms, 30s or 15m, or whole milliseconds",
    Kind.SIZE: "a size such as 512KiB or 4MiB, or whole bytes",
    Kind.FLAG: "true or false",
    Kind.TEXT: "a text",
    Kind.LIST: "a list of texts",
    Kind.TABLE: "a table",
}

_COUNTED: Final = {Kind.DURATION: ", which is milliseconds", Kind.SIZE: ", which is bytes"}
"""What a number without a unit is."""


class Misfit(UsageError):
    """A setting that does not fit; `setting` is its place in the tables of a file, for whoever knows its line."""

    def __init__(self, setting: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.setting = setting


class Given(NamedTuple):
    """A value, and where it was given: `--executors`, `CALLYARD_SANDBOX`, `callyard.toml:3`."""

    value: Any
    origin: str


Layer = Mapping[str, Given]
"""By setting. Of several layers the last one that has a setting decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    name: str
    kind: Kind
    default: Any
    why: str
    low: int = 0
    high: int = 0
    choices: tuple[str, ...] = ()
    is_optional: bool = False
    """May be None: it is derived, or somebody else's."""
    variable: str = ""
    """Its own name in the environment, after `CALLYARD_`; empty: by the setting's name."""
    also: str = ""
    """Another name, by which calls in Python know it; empty: none."""

    @property
    def short_name(self) -> str:
        return shorten(self.name)

    @property
    def variables(self) -> tuple[str, ...]:
        """Those that are read; the first is the one to show."""
        names = (self.variable, self.name.upper(), self.short_name.upper(), self.also.upper())
        return tuple(dict.fromkeys(f"CALLYARD_{name}" for name in names if name))

    def check(self, value: object, shown: str) -> None:
        """Of a value in Python. `shown`: the name under which it was given. Raises UsageError."""
        if value is None and self.is_optional:
            return
        if self.kind in (Kind.NUMBER, Kind.DURATION, Kind.SIZE):
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"{shown} must be a whole number, got {value!r}")
            self._check_range(value, shown, str(value))
        elif self.kind is Kind.CHOICE:
            if not isinstance(value, str) or value not in self.choices:
                raise UsageError(f"{shown} must be one of {', '.join(self.choices)}, got {value!r}")
        elif self.kind is Kind.FLAG:
            if not isinstance(value, bool):
                raise self._refuse(value, shown)
        elif self.kind is Kind.TEXT:
            if not isinstance(value, str) or "\0" in value or len(value) > TEXT_CHARACTERS_MAX:
                raise self._refuse(value, shown)
        elif not isinstance(value, Mapping if self.kind is Kind.TABLE else list | tuple):
            raise self._refuse(value, shown)

    def read(self, value: object, shown: str) -> Any:
        """Of a value in TOML: durations and sizes may be texts. Raises UsageError."""
        if self.kind in (Kind.DURATION, Kind.SIZE) and isinstance(value, str):
            amount = read_duration_ms(value) if self.kind is Kind.DURATION else read_size_bytes(value)
            if amount is None or 0 < amount < 1 or amount > _AMOUNT_MAX:
                raise self._refuse(value, shown)
            self._check_range(round(amount), shown, value)
            return round(amount)
        if value is None or (self.kind in (Kind.NUMBER, Kind.DURATION, Kind.SIZE) and type(value) is not int):
            raise self._refuse(value, shown)
        self.check(value, shown)
        return self.choices[self.choices.index(value)] if self.kind is Kind.CHOICE else value

    def parse(self, text: str, shown: str) -> Any:
        """Of a text: a variable, or what stands after `--set NAME=`. Raises UsageError."""
        word = text.strip()
        digits = word.removeprefix("+").removeprefix("-")
        is_whole = digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX
        if self.kind is Kind.FLAG:
            if word.lower() not in _FLAGS:
                raise self._refuse(text, shown)
            return _FLAGS[word.lower()]
        if self.kind in (Kind.NUMBER, Kind.DURATION, Kind.SIZE) and is_whole:
            self.check(int(word), shown)
            return int(word)
        if self.kind is Kind.TABLE:
            raise UsageError(f"{shown} is a table, which only a file can give")
        if self.kind is Kind.LIST:
            return self.read([one.strip() for one in text.split(",") if one.strip()], shown)
        return self.read(word if self.kind in (Kind.DURATION, Kind.SIZE, Kind.CHOICE) else text, shown)

    def show(self, value: Any) -> str:
        """As TOML."""
        return show_toml(value, self.kind)

    def _check_range(self, value: int, shown: str, given: str) -> None:
        if not self.low <= value <= self.high:
            low, high = str(self.low), str(self.high)
            if given != str(value):
                low, high = (show_amount(bound, self.kind) for bound in (self.low, self.high))
            unit = "" if given != str(value) else _COUNTED.get(self.kind, "")
            raise UsageError(f"{shown} must be from {low} to {high}, got {given}{unit}")

    def _refuse(self, value: object, shown: str) -> UsageError:
        expected = f"one of {', '.join(self.choices)}" if self.kind is Kind.CHOICE else _EXPECTED[self.kind]
        got = type(value).__name__ if self.kind is Kind.TABLE else repr(value)  # variables of processes may be secret
        return UsageError(f"{shown} must be {expected}, got {got}")


def shorten(name: str) -> str:
    """Without the unit. What only bytes are counted of keeps it: `tenant_bytes` is no tenant."""
    short = _UNIT.sub("", name)
    return short if "_" in short or not name.endswith("_bytes") else name


# --- tables of settings -------------------------------------------------------------------------------------------


def setting(
    default: Any,
    why: str,
    *,
    low: int = 0,
    high: int | None = None,
    choices: Iterable[str] = (),
    variable: str = "",
    also: str = "",
    size: bool = False,
    kind: Kind | None = None,
) -> Any:
    """A dataclass field that is a setting. `default` may be a callable that makes it; None: the setting is optional.
    `size`: bytes, though the name does not say so. `kind`: where neither default nor range tells it."""
    about = {
        "why": why,
        "low": low,
        "high": high,
        "choices": tuple(choices),
        "variable": variable,
        "also": also,
        "size": size,
        "kind": kind,
    }
    if callable(default):
        return field(default_factory=default, metadata={"setting": about})
    return field(default=default, metadata={"setting": about})


def settings_of(kind: type, inherited: Mapping[str, Setting] | None = None) -> dict[str, Setting]:
    """The settings of a dataclass, by name. A field without `setting` is that of `inherited` with the same name, and
    may be None."""
    found: dict[str, Setting] = {}
    for one in fields(kind):
        about = one.metadata.get("setting")
        if about is not None:
            found[one.name] = _build(one, about)
        elif inherited is not None:
            found[one.name] = replace(inherited[one.name], default=None, is_optional=True)
    return found


def _build(one: Field[Any], about: Mapping[str, Any]) -> Setting:
    default = one.default
    if about["kind"] is not None:
        kind = about["kind"]
    elif about["high"] is not None:
        kind = Kind.NUMBER
        unit = _UNIT.search(one.name)
        if about["size"] or (unit is not None and unit[1] == "bytes"):
            kind = Kind.SIZE
        elif unit is not None:
            kind = Kind.DURATION
    elif about["choices"]:
        kind = Kind.CHOICE
    elif isinstance(default, bool):
        kind = Kind.FLAG
    else:
        kind = Kind.TEXT if isinstance(default, str) else Kind.TABLE
    return Setting(
        name=one.name,
        kind=kind,
        default={} if default is MISSING else default,
        why=about["why"],
        low=about["low"],
        high=about["high"] or 0,
        choices=about["choices"],
        is_optional=default is None,
        variable=about["variable"],
        also=about["also"],
    )


def names_of(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Every name under which each setting may be written, to the setting's own."""
    return {name: one.name for one in settings.values() for name in (one.short_name, one.name, one.also) if name}


def read_table(settings: Mapping[str, Setting], table: Mapping[str, Any], where: tuple[str, ...]) -> dict[str, Any]:
    """A table of TOML. Raises Misfit for what is no setting, is there twice, or does not fit."""
    return read_named(names_of(settings), table, where, lambda name, value, shown: settings[name].read(value, shown))


def read_named(
    names: Mapping[str, str], table: Mapping[str, Any], where: tuple[str, ...], read: Callable[[str, Any, str], Any]
) -> dict[str, Any]:
    """The same by any `names`. `read` is given the setting's name, the value, and the name as it is written; the place
    of what does not fit starts from there."""
    values: dict[str, Any] = {}
    for written, value in table.items():
        name = find_name(written, names, where)
        if name in values:
            raise Misfit((*where, written), f"{'.'.join((*where, written))} is there twice: {name} is the same setting")
        values[name] = within((*where, written), partial(read, name, value, written))
    return values


def read_variables(
    settings: Mapping[str, Setting], environ: Mapping[str, str], skip: Iterable[str] = ()
) -> dict[str, Given]:
    """The variables `CALLYARD_…`. Those of settings in `skip` are not looked at: they were given otherwise. Raises
    UsageError, also for a variable that is nearly the name of one."""
    known = {variable: one.name for one in settings.values() for variable in one.variables}
    passed_over = frozenset(skip)
    found: dict[str, Given] = {}
    for variable, text in environ.items():
        if not variable.startswith("CALLYARD_"):
            continue
        name = known.get(variable)
        if name is None:
            close = difflib.get_close_matches(variable, known, 1, 0.9)
            if close:
                raise UsageError(f"the variable {variable} is no setting; did you mean {close[0]}?")
        elif name not in passed_over:
            if name in found:
                raise UsageError(f"{found[name].origin} and {variable} are the same setting: keep one of them")
            found[name] = Given(settings[name].parse(text, variable), variable)
    return found


def read_pairs(
    names: Mapping[str, str], pairs: Iterable[str], option: str, parse: Callable[[str, str, str], Any]
) -> dict[str, Given]:
    """`NAME=VALUE` of the command line. `parse` is given the setting's name, the text, and the name to show. Raises
    UsageError."""
    found: dict[str, Given] = {}
    for pair in pairs:
        written, equals, text = pair.partition("=")
        written = written.strip()
        if not equals:
            raise UsageError(f"{option} expects NAME=VALUE, such as {option} max_restarts=3, got {pair!r}")
        name = within((), partial(find_name, written, names, ()), f"{option}: ")
        if name in found:
            raise UsageError(f"{option} {name} was given twice")
        found[name] = Given(parse(name, text, f"{option} {written}"), f"{option} {written}")
    return found


def find_name(written: str, names: Mapping[str, str] | Iterable[str], where: tuple[str, ...]) -> str:
    """The setting that is written so. `names`: each name there is, to the setting's own. Raises Misfit, which says what
    was perhaps meant."""
    known = names if isinstance(names, Mapping) else {name: name for name in names}
    if written in known:
        return known[written]
    raise Misfit((*where, written), f"no setting {'.'.join((*where, written))!r}; {suggest(written, known)}")


def suggest(written: str, names: Mapping[str, str] | Iterable[str]) -> str:
    """What was perhaps meant, or else all that there is."""
    known = names if isinstance(names, Mapping) else {name: name for name in names}
    close: dict[str, str] = {}
    for name in difflib.get_close_matches(written, known, 4, 0.7):
        close.setdefault(known[name], name)
    if close:
        return f"did you mean {' or '.join(list(close.values())[:_SUGGESTED_MAX])}?"
    own = list(dict.fromkeys(known.values()))
    if len(own) > _LISTED_MAX:
        return (
            f"there are {len(own)}, such as {', '.join(own[:_SHOWN_MAX])}: --print-config of a command shows them all"
        )
    return f"there are: {', '.join(own)}"


def within(place: tuple[str, ...], build: Callable[[], T], before: str = "") -> T:
    """What does not fit of what is built does not fit there."""
    try:
        return build()
    except UsageError as error:
        inner = error.setting if isinstance(error, Misfit) else ()
        raise Misfit((*place, *inner), f"{before}{error}") from error


# --- TOML ---------------------------------------------------------------------------------------------------------


def find_line(text: str, place: Iterable[str]) -> int | None:
    """Where a setting such as `("serve", "tokens", "ci", "tenant")` stands in a TOML text, or else the table that it is
    in; None: it cannot be told."""
    wanted = tuple(place)
    table: tuple[str, ...] = ()
    best: int | None = None
    for number, line in enumerate(text.split("\n"), 1):
        if (header := _HEADER.fullmatch(line)) is not None:
            table = _split_key(header[1])
            if wanted and table == wanted[: len(table)]:
                best = number
        elif (pair := _PAIR.match(line)) is not None:
            name = (*table, *_split_key(pair[1]))
            if name and name == wanted[: len(name)]:
                return number
    return best


_HEADER: Final = re.compile(r"\s*\[{1,2}([^\[\]]+)\]{1,2}\s*(?:#.*)?")
_PAIR: Final = re.compile(
    r"\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'))*)\s*="
)
_KEY_PART: Final = re.compile(r"\"([^\"]*)\"|'([^']*)'|([A-Za-z0-9_-]+)")


def _split_key(text: str) -> tuple[str, ...]:
    return tuple(match[1] or match[2] or match[3] or "" for match in _KEY_PART.finditer(text))


def show_toml(value: Any, kind: Kind | None = None) -> str:
    """A value as TOML writes it, with its unit."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f'"{show_amount(value, kind)}"' if kind in (Kind.DURATION, Kind.SIZE) and value else f"{value:_}"
    if isinstance(value, float | date | time):
        return repr(value) if isinstance(value, float) else value.isoformat()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{show_key(name)} = {show_toml(one)}" for name, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show_toml, value))}]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped) + '"'


def show_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else show_toml(name)


def show_amount(value: int, kind: Kind | None) -> str:
    """In the largest unit of which it is a whole number."""
    units = _DURATIONS if kind is Kind.DURATION else _SIZES if kind is Kind.SIZE else ()
    for unit, size in units:
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return str(value)
