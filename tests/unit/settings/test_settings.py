"""One setting: how it is read as text, as TOML and in Python, and what is said of what does not fit."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from callyard.errors import UsageError
from callyard.quantities import read_duration_ms, read_size_bytes
from callyard.serve.config import SERVE_SETTINGS
from callyard.settings import (
    Kind,
    Misfit,
    Setting,
    find_line,
    find_name,
    names_of,
    read_pairs,
    read_table,
    read_variables,
    setting,
    settings_of,
    show_amount,
    show_toml,
    suggest,
)
from callyard.worker.config import POOL_SETTINGS, WORKER_SETTINGS, PoolConfig, WorkerConfig

pytestmark = pytest.mark.requirement("X73")


@dataclass(frozen=True, kw_only=True)
class Oven:
    heat_ms: int = setting(1_000, "how long", low=100, high=60_000)
    room_bytes_max: int = setting(1_024, "how much", high=1 << 20)
    trays: int = setting(2, "how many", low=1, high=9, variable="TRAY_COUNT")
    cap: int = setting(0, "a size by another name", high=1 << 20, size=True)
    fan: bool = setting(False, "whether it blows")
    mode: str = setting("bake", "what it does", choices=("bake", "grill"))
    label: str = setting("", "what stands on it")
    racks: tuple[str, ...] = setting((), "names", kind=Kind.LIST)
    rest_ms: int | None = setting(None, "derived", low=1, high=60_000)
    parts: Mapping[str, Any] = setting(dict, "tables")


OVEN = settings_of(Oven)
NAMES = names_of(OVEN)


def parse(name: str, text: str, shown: str) -> Any:
    return OVEN[name].parse(text, shown)


def test_fields_say_what_settings_are() -> None:
    kinds = {name: one.kind.value for name, one in OVEN.items()}
    assert kinds == {
        "heat_ms": "duration",
        "room_bytes_max": "size",
        "trays": "number",
        "cap": "size",
        "fan": "flag",
        "mode": "choice",
        "label": "text",
        "racks": "list",
        "rest_ms": "duration",
        "parts": "table",
    }
    assert (Oven().heat_ms, Oven().parts, Oven().rest_ms) == (1_000, {}, None)
    assert OVEN["trays"].variables == ("CALLYARD_TRAY_COUNT", "CALLYARD_TRAYS")
    assert OVEN["heat_ms"].variables == ("CALLYARD_HEAT_MS", "CALLYARD_HEAT")
    assert NAMES["room_max"] == NAMES["room_bytes_max"] == "room_bytes_max"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("heat_ms", "2s", 2_000),
        ("heat_ms", "2500", 2_500),
        ("heat_ms", " 1.5s ", 1_500),
        ("room_bytes_max", "64KiB", 65_536),
        ("room_bytes_max", "100", 100),
        ("cap", "1MiB", 1 << 20),
        ("trays", "+3", 3),
        ("fan", "TRUE", True),
        ("fan", "0", False),
        ("mode", "grill", "grill"),
        ("label", " as it is ", " as it is "),
        ("racks", "a, b,", ["a", "b"]),
        ("rest_ms", "1m", 60_000),
        ("room_bytes_max", "0.0015MiB", 1_573),
    ],
)
def test_text_is_read(name: str, text: str, value: object) -> None:
    assert parse(name, text, "X") == value


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("heat_ms", "soon", "X must be a duration such as 500ms, 30s or 15m, or whole milliseconds, got 'soon'"),
        ("heat_ms", "50ms", "X must be from 100ms to 1m, got 50ms"),
        ("heat_ms", "50", "X must be from 100 to 60000, got 50"),
        ("heat_ms", "0.2ms", "X must be a duration"),
        ("heat_ms", "9" * 400 + "s", "X must be a duration"),
        ("room_bytes_max", "2MiB", "X must be from 0 to 1MiB, got 2MiB"),
        ("trays", "many", "X must be a whole number, got 'many'"),
        ("trays", "10", "X must be from 1 to 9, got 10"),
        ("trays", "1_0", "X must be a whole number"),
        ("trays", "9" * 5_000, "X must be a whole number"),
        ("fan", "yes", "X must be true or false, got 'yes'"),
        ("mode", "fry", "X must be one of bake, grill, got 'fry'"),
        ("label", "\0", "X must be a text"),
        ("parts", "{}", "X is a table, which only a file can give"),
    ],
)
def test_text_that_does_not_fit(name: str, text: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(name, text, "X")
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heat_ms", 1.5),
        ("heat_ms", True),
        ("trays", "3"),
        ("fan", 1),
        ("mode", 3),
        ("label", 3),
        ("racks", "a"),
        ("parts", []),
    ],
)
def test_toml_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match="X must be"):
        OVEN[name].read(value, "X")


def test_a_table_is_read_under_either_name() -> None:
    table = {"heat": "2s", "room_bytes_max": 5, "parts": {"a": 1}}
    assert read_table(OVEN, table, ("oven",)) == {"heat_ms": 2_000, "room_bytes_max": 5, "parts": {"a": 1}}
    with pytest.raises(Misfit, match=r"^oven\.heat_ms is there twice: heat_ms is the same setting$") as twice:
        read_table(OVEN, {"heat": 200, "heat_ms": 200}, ("oven",))
    assert twice.value.setting == ("oven", "heat_ms")
    with pytest.raises(Misfit, match=r"^no setting 'oven\.heet'; did you mean heat\?$"):
        read_table(OVEN, {"heet": 1}, ("oven",))
    with pytest.raises(Misfit, match=r"^trays must be from 1 to 9, got 0$") as small:
        read_table(OVEN, {"trays": 0}, ("oven",))
    assert small.value.setting == ("oven", "trays")


def test_a_name_that_is_far_off_lists_each_setting_once() -> None:
    with pytest.raises(Misfit, match=r"^no setting 'q'; there are: heat_ms, room_bytes_max, trays, cap, fan, "):
        find_name("q", NAMES, ())
    assert suggest("room_mx", NAMES) == "did you mean room_max?", "and not room_bytes_max too, which is the same"


def test_variables_are_read_by_all_of_their_names() -> None:
    found = read_variables(
        OVEN, {"CALLYARD_TRAY_COUNT": "3", "CALLYARD_HEAT": "2s", "HOME": "/", "CALLYARD_TOKEN": "x"}
    )
    assert {name: tuple(one) for name, one in found.items()} == {
        "trays": (3, "CALLYARD_TRAY_COUNT"),
        "heat_ms": (2_000, "CALLYARD_HEAT"),
    }
    with pytest.raises(UsageError, match="CALLYARD_TRAY_COUNT and CALLYARD_TRAYS are the same setting: keep one"):
        read_variables(OVEN, {"CALLYARD_TRAY_COUNT": "3", "CALLYARD_TRAYS": "3"})
    with pytest.raises(
        UsageError, match=r"^the variable CALLYARD_TRAY_CUONT is no setting; did you mean CALLYARD_TRAY_"
    ):
        read_variables(OVEN, {"CALLYARD_TRAY_CUONT": "3"})
    assert read_variables(OVEN, {"CALLYARD_TRAYS": "many"}, skip=["trays"]) == {}, "an option goes before it"


def test_pairs_of_the_command_line() -> None:
    assert read_pairs(NAMES, ["heat=2s", "mode = grill"], "--set", parse)["heat_ms"] == (2_000, "--set heat")
    for pairs, says in (
        (["heat"], r"--set expects NAME=VALUE, such as --set max_restarts=3, got 'heat'"),
        (["heat=2s", "heat_ms=3"], "--set heat_ms was given twice"),
        (["heet=2s"], r"--set: no setting 'heet'; did you mean heat\?"),
        (["heat=soon"], "--set heat must be a duration"),
    ):
        with pytest.raises(UsageError, match=says):
            read_pairs(NAMES, pairs, "--set", parse)


def test_what_is_shown_is_read_again() -> None:
    amounts: list[tuple[int, Kind, str]] = [
        (90_000, Kind.DURATION, "90s"),
        (7_200_000, Kind.DURATION, "2h"),
        (1_001, Kind.DURATION, "1001ms"),
        (3 << 20, Kind.SIZE, "3MiB"),
        (1_000, Kind.SIZE, "1000"),
    ]
    for value, kind, text in amounts:
        assert show_amount(value, kind) == text
        assert (read_duration_ms(text) if kind is Kind.DURATION else read_size_bytes(text)) == value
    shown = show_toml({"a": [1, True, 'x"\\\n'], "b c": {}})
    assert shown == '{ a = [1, true, "x\\"\\\\\\U0000000A"], "b c" = {  } }'


def test_every_kind_of_value_that_toml_has_is_shown_as_one_of_its_kind() -> None:
    text = "a = [1.5, -inf, 1e300]\nb = 2026-11-30T18:00:00.5+01:00\nc = 2026-11-30\nd = 18:00:00\n"
    table = tomllib.loads(f"{text}e = true\nf = [{{ x = 1 }}]\n")
    assert tomllib.loads(f"table = {show_toml(table)}")["table"] == table


def test_lines_are_found() -> None:
    text = '[a]\nx = 1\n[a.b]\n"y z" = 2\n'
    assert [find_line(text, place) for place in (("a", "x"), ("a", "b", "y z"), ("a", "q"), ("c",))] == [2, 4, 1, None]


# --- the real tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "elsewhere"),
    [
        (WorkerConfig, WORKER_SETTINGS, set()),
        (PoolConfig, POOL_SETTINGS, set()),
        (None, SERVE_SETTINGS, {"tokens", "worker", "pools", "io", "file"}),
    ],
    ids=["worker", "pool", "serve"],
)
def test_every_field_is_a_setting_with_a_meaning(
    kind: type | None, settings: Mapping[str, Setting], elsewhere: set[str]
) -> None:
    names = names_of(settings)
    assert len(names) == len({(name, own) for name, own in names.items()})
    assert len({one.short_name for one in settings.values()}) == len(settings), "no two have one short name"
    for one in settings.values():
        assert one.why, one.name
        if one.kind in (Kind.NUMBER, Kind.DURATION, Kind.SIZE):
            assert one.low < one.high, one.name
            assert one.default is None or one.low <= one.default <= one.high, one.name
        assert one.kind is not Kind.NUMBER or not one.name.endswith(("_ms", "_bytes")), one.name
    if kind is not None:
        assert set(settings) | elsewhere == set(kind.__dataclass_fields__)  # type: ignore[attr-defined]


def test_no_variable_stands_for_two_settings() -> None:
    variables = [name for one in WORKER_SETTINGS.values() for name in one.variables]
    assert len(variables) == len(set(variables))


@pytest.mark.parametrize("name", WORKER_SETTINGS)
def test_each_setting_of_the_worker_comes_back_from_toml_and_text(name: str) -> None:
    one = WORKER_SETTINGS[name]
    if one.kind is Kind.TABLE or one.default is None:
        return
    shown = one.show(one.default)
    text = shown.strip('"')
    assert one.parse(text.replace("_", "") if one.kind is Kind.NUMBER else text, "X") == one.default
