"""Help, `call`, `list`, targets that are none, settings of the environment."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import callyard
from tests.e2e.cli.shell import TARGET, finish, run, started


def test_help_is_readable_and_shows_examples() -> None:
    bare, long = run(), run("--help")
    assert bare.out.strip() == long.out.strip()
    assert (bare.status, long.status) == (2, 0)
    for words in ("callyard run functions.py:assess flights.jsonl -o out.jsonl", "Run one call and print its value"):
        assert words in long.out
    shown = run("run", "-h")
    assert shown.status == 0
    for words in ("--max-failures", "--budget", "130 interrupted", "When calls fail", "zcat calls.jsonl.gz"):
        assert words in " ".join(shown.out.split())


def test_a_typing_error_gets_a_suggestion() -> None:
    command, option = run("rnu", TARGET), run("call", TARGET, "--buget", "2s")
    assert (command.status, option.status) == (2, 2)
    assert "Did you mean 'run'?" in command.err
    assert "--budget" in option.err


def test_version() -> None:
    assert run("--version").out == f"callyard {callyard.__version__}\n"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["say", "text=17"], "17"),
        (["third", "--json", '{"x": 4, "name": "ü"}'], 4),
    ],
)
def test_call_prints_the_value_as_json(words: list[str], value: object) -> None:
    done = run("call", f"{TARGET}:{words[0]}", *words[1:])
    assert (done.status, json.loads(done.out)) == (0, value)
    assert done.err == ("exec-1 | says 17\n" if words[0] == "say" else "")


@pytest.mark.requirement("D49")
@pytest.mark.parametrize(
    "words",
    [["rider=ada", "km=2"], ["--json", '{"rider": "ada", "km": 2}'], ['trip={"rider": "ada", "km": 2}']],
    ids=["words", "json", "by its own name"],
)
def test_call_takes_the_fields_of_the_one_object_as_run_does(words: list[str]) -> None:
    target = TARGET.with_name("tables_file.py")
    done = run("call", f"{target}:price", *words)
    assert (done.status, json.loads(done.out)) == (0, {"rider": "ada", "fare": 4.0})
    missing = run("call", f"{target}:price")
    assert missing.status == 1
    assert "/km: required, but missing" in missing.err


@pytest.mark.requirement("X62")
def test_a_call_that_may_have_had_its_effect_says_so() -> None:
    unknown = "the outcome is unknown: what it had begun to do may be done\n"
    assert run("call", f"{TARGET}:die", "x=0").err.endswith(unknown)
    assert unknown not in run("call", f"{TARGET}:third", "x=tea").err


def test_a_failed_call_shows_the_users_own_stack() -> None:
    done = run("call", f"{TARGET}:third", "x=3", "name=tea")
    assert (done.status, done.out) == (1, "")
    assert 'File "tests/e2e/cli/functions_file.py", line ' in done.err
    assert "raise ValueError" in done.err
    assert done.err.splitlines()[-1] == "internal (the function raised): ValueError: 3 of 'tea' is divisible by 3"
    assert "callyard-run-" not in done.err
    assert "asyncio" not in done.err


@pytest.mark.requirement("X89")
def test_an_overrun_names_its_limit(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    rows = json.dumps([str(begun), "block"]) + "\n" + json.dumps(["", "block"]) + "\n"
    listed = run("run", f"{TARGET}:wait_here", "-", "--budget", "200ms", stdin=rows)
    overrun, other = listed.results
    assert (overrun["error"]["kind"], overrun["error"]["details"]["limit"]) == ("timeout", "budget_ms")
    assert other["ok"]
    assert "1 executor, budget 200 ms a call" in listed.err
    assert "call 0, line 1: ran out of its budget of 200 ms" in listed.err


def test_arguments_that_are_none() -> None:
    no_pair, no_duration = run("call", TARGET, "x"), run("call", TARGET, "x=1", "--budget", "soon")
    assert (no_pair.status, no_duration.status) == (2, 2)
    assert no_pair.err == "error: expected NAME=VALUE, got 'x'; for other arguments use --json '[…]'\n"
    assert "expected a duration such as 250ms, 2s, 5m or 1h, got 'soon'" in " ".join(no_duration.err.split())


def test_call_needs_one_function() -> None:
    several, unknown = run("call", TARGET, "x=1"), run("call", f"{TARGET}:duble", "x=1")
    assert several.status == unknown.status == 2
    assert "has several functions: write" in several.err
    assert "error: no function 'duble' in functions_file.py; did you mean 'double'?" in unknown.err


def test_list_for_people_and_for_programs(tmp_path: Path) -> None:
    people, programs = run("list", TARGET), run("list", TARGET, "--json")
    assert people.status == programs.status == 0
    lines = people.out.splitlines()
    assert lines[0] == "double(x: int) -> int  [pure]"
    assert lines[1] == "    Twice as much."
    assert "third(x: int, name: str = 'nobody') -> int" in lines
    assert "\x1b" not in people.out
    listing = json.loads(programs.out)
    double = listing["functions"][0]
    assert (double["name"], double["promises"]) == ("double", {"pure": True, "read_only": True, "idempotent": True})
    assert double["input_schema"]["properties"]["x"]["type"] == "integer"
    assert [function["name"] for function in listing["functions"]][:3] == ["double", "third", "say"]


@pytest.mark.requirement("X86")
def test_list_shows_the_packages_that_are_imported(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("import json, msgspec\ndef f(x: int) -> int: return x\n")
    done = run("list", "m.py", cwd=tmp_path)
    assert done.status == 0
    assert done.out.splitlines()[-1].startswith("imports msgspec==")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(:\n", "m.py:1: SyntaxError: invalid syntax"),
        ("\ndef g():\n    raise RuntimeError('no')\ng()\n", "m.py:3: RuntimeError: no"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "ended its process: it was killed by SIGSEGV"),
        ("import time\ntime.sleep(600)\n", "took longer than start_timeout_ms=1000"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "m.py").write_text(source)
    (tmp_path / "rows.jsonl").write_text("[1]\n")
    done = run("run", "m.py:f", "rows.jsonl", "-o", "out.jsonl", "--start-timeout", "1s", cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out.jsonl").exists()


def test_debug_shows_the_stack_of_an_import(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def g():\n    raise RuntimeError('no')\ng()\n")
    done = run("list", "m.py", "--debug", cwd=tmp_path)
    assert done.status == 2
    assert 'File "m.py", line 3, in <module>' in done.err
    assert done.err.splitlines()[-1] == "error: m.py:2: RuntimeError: no"


def test_a_target_that_is_none(tmp_path: Path) -> None:
    done = run("call", "missing.py:f", cwd=tmp_path)
    assert done.status == 2
    assert "missing.py does not exist: expected a Python file, such as functions.py" in done.err


@pytest.mark.requirement("X73")
@pytest.mark.parametrize("words", [["call", f"{TARGET}:double", "x=1"], ["list", str(TARGET)]])
def test_a_bad_variable_is_said(words: list[str]) -> None:
    done = run(*words, env={"CALLYARD_SPARE_EXECUTORS": "many"})
    assert (done.status, done.out) == (2, "")
    assert done.err == "error: CALLYARD_SPARE_EXECUTORS must be a whole number, got 'many'\n"


def test_a_file_beside_the_functions_is_sent_along_when_included(tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text('{"de": 19}')
    (tmp_path / "m.py").write_text(
        "import json, pathlib\n"
        "def rate(of: str) -> int:\n"
        "    return json.loads((pathlib.Path(__file__).parent / 'rates.json').read_text())[of]\n"
    )
    without = run("call", "m.py:rate", "of=de", cwd=tmp_path)
    assert without.status == 1
    assert "No such file or directory: 'rates.json'" in without.err
    done = run("call", "m.py:rate", "of=de", "--include", "*.json", cwd=tmp_path)
    assert (done.status, done.out) == (0, "19\n")


def test_an_import_within_a_function_that_fails_says_what_installs_it(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "def f() -> int:\n    import no_such_library.part\n    return 1\n\n\n"
        "def caught() -> str:\n    try:\n        import no_such_library\n    except ImportError as error:\n"
        "        return str(error)\n"
    )
    done = run("call", "m.py:f", cwd=tmp_path)
    assert done.status == 1
    assert (
        "ModuleNotFoundError: No module named 'no_such_library' (no_such_library is neither in the bundle nor"
        in done.err
    )
    assert re.search(r"if it is a package: \S+ .*pip install .*no_such_library\)", done.err)
    assert run("call", "m.py:caught", cwd=tmp_path).out == "\"No module named 'no_such_library'\"\n", "it is theirs"


def test_part_of_a_line_is_shown(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "from callyard import sleep\n"
        "def f(a, *args, k=1, **more):\n    print('no newline', end='')\n    return [a, args, k, more]\n"
    )
    done = run("call", "m.py:f", "a=1", "z=2", cwd=tmp_path)
    assert (done.status, json.loads(done.out)) == (0, ["1", [], 1, {"z": "2"}])
    assert done.err == "exec-1 | no newline\n"


def test_part_of_a_line_is_shown_while_the_call_waits(tmp_path: Path) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    (tmp_path / "m.py").write_text(
        "import os\nfrom callyard import sleep\n"
        "def f(begun: str, go: str):\n    print('half', end='')\n    open(begun, 'w').close()\n"
        "    while not os.path.exists(go):\n        sleep(0.01)\n    print()\n    print('whole')\n"
    )
    with started("call", "m.py:f", f"begun={begun}", f"go={go}", cwd=tmp_path) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "exec-1 | half\n"
        assert not go.exists()
        go.touch()
        assert finish(process).err == "exec-1 | whole\n"


def test_an_overrun_shows_where_and_nothing_of_the_engine() -> None:
    done = run("call", f"{TARGET}:wait_here", "path=/dev/null", "how=spin", "--budget", "100ms")
    assert done.status == 1
    assert done.err.startswith("Stopped here (most recent call last):\n")
    assert "BudgetExceeded" not in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "-1"], "'--limit': expected a whole number of at least 0, got '-1'"),
        (["-x", "2000"], "'-x': expected a whole number from 1 to 1024, got '2000'"),
        (["--format", "xml"], "unknown format 'xml': expected jsonl (or ndjson), csv, tsv, json or parquet"),
    ],
)
def test_a_setting_is_named_as_it_was_given(words: list[str], message: str) -> None:
    done = run("run", TARGET, "-", *words)
    assert done.status == 2
    assert message in " ".join(done.err.replace("│", " ").split())
