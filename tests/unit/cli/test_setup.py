"""Which of several places decides a setting, and whose settings file is read."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from callyard.cli.print_config import mask, show_serve, show_worker
from callyard.cli.setup import Setup
from callyard.errors import UsageError
from callyard.serve.config import ServeConfig
from callyard.settings import Given
from callyard.worker.config import PoolConfig
from callyard.worker.settings_file import SettingsFile

pytestmark = pytest.mark.requirement("X73")
FILE = """\
[worker]
max_restarts = 1
backoff = "1s"
spare_executors = 1
base_backoff_ms = 1
[pools.gpu]
executors = 1
environment = { API_TOKEN = "sesame", CUDA_VISIBLE_DEVICES = "{slot}" }
[pools.big]
[io.jsonrpc]
prices = { url = "https://me:hunter2@example.com/rpc", headers = { X = "sesame" } }
[serve]
deadline = "20s"
store = "redis://me:hunter2@example.com/0"
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "callyard.toml").write_text(FILE)
    path = tmp_path / "f.py"
    path.write_text("")
    return path


def test_an_option_goes_before_a_variable_before_the_file_before_the_default(target: Path) -> None:
    setup = Setup(options={"spare_executors": Given(4, "--spare")}, sets=("backoff=4s",))
    environ = {"CALLYARD_MAX_RESTARTS": "3", "CALLYARD_EXECUTOR_BACKOFF_MS": "3s", "CALLYARD_SPARE_EXECUTORS": "wrong"}
    settings = setup.read(target, environ)
    config = settings.config
    assert (config.spare_executors, config.backoff_ms) == (4, 4_000)
    assert (config.max_restarts, config.base_backoff_ms, config.cancel_grace_ms) == (3, 1, 250)
    assert {name: one.origin for name, one in settings.given.items()} == {
        "executor_python": "default of commands",
        "spare_executors": "--spare",
        "backoff_ms": "--set backoff",
        "max_restarts": "CALLYARD_MAX_RESTARTS",
        "base_backoff_ms": "callyard.toml:5",
        "pools": "callyard.toml",
    }
    assert settings.io is not None
    assert settings.found.note == "settings of callyard.toml"


def test_pools_of_the_command_line_stand_beside_those_of_the_file(target: Path) -> None:
    setup = Setup(options={"pools": Given({"gpu": PoolConfig(executors=7)}, "--pool")})
    pools = setup.read(target, {}).config.pools
    assert {name: pool.executors for name, pool in pools.items()} == {"gpu": 7, "big": 1}


def test_a_setting_is_given_once_on_the_command_line(target: Path) -> None:
    with pytest.raises(UsageError, match="--set executor_count and --executors are the same setting"):
        Setup(options={"executor_count": Given(2, "--executors")}, sets=("worker.executor_count=2",)).read(target, {})
    with pytest.raises(UsageError, match="--set executor_count: that is settled by callyard call"):
        Setup(fixed={"executor_count": Given(1, "callyard call")}, sets=("executor_count=2",)).read(target, {})


@pytest.mark.requirement("X46")
@pytest.mark.parametrize(
    "setup",
    [
        Setup(options={"sandbox": Given("auto", "--sandbox")}),
        Setup(sets=("sandbox=bwrap",)),
        Setup(sets=("executor_spawn_mode=sandbox",)),
        Setup(audit="ast"),
        Setup(audit_log=Path("log.jsonl")),
    ],
    ids=["sandbox", "set", "mode", "audit", "audit_log"],
)
def test_a_file_beside_code_that_is_not_trusted_has_no_say(target: Path, setup: Setup) -> None:
    """Else it would loosen its own confinement: `sandbox_min = "off"`, pools without one, what `[io]` reaches."""
    settings = setup.read(target, {})
    assert settings.found.file is None
    assert settings.io is None
    assert settings.config.max_restarts == 10
    assert settings.found.note == ("callyard.toml, beside code that is not trusted, is not read: name it with --config")


def test_by_a_variable_it_is_not_trusted_either_but_a_named_file_is(target: Path) -> None:
    assert Setup().read(target, {"CALLYARD_SANDBOX": "auto"}).found.file is None
    named = Setup(config=target.parent / "callyard.toml").read(target, {"CALLYARD_SANDBOX": "auto"})
    assert named.config.max_restarts == 1
    assert named.found.note == "", "who named it need not be told"


def test_a_file_may_confine_its_own_code(target: Path) -> None:
    (target.parent / "callyard.toml").write_text('[worker]\nsandbox = "auto"\n')
    setup = Setup()
    settings = setup.read(target, {})
    assert settings.config.sandbox_choice == "auto"
    assert not setup.is_trusted(settings.config), "from there on it is not trusted: no .venv of it is started"


def test_nothing_of_a_file_beside_code_that_is_not_trusted_is_parsed(target: Path) -> None:
    """Else it could use up the command's time: TOML's dotted keys cost the square of their length."""
    (target.parent / "callyard.toml").unlink()
    project = target.parent / "pyproject.toml"
    project.write_text("[tool.callyard.worker]\n[no TOML from here on")
    assert Setup(sets=("sandbox=bwrap",)).read(target, {}).found.note.startswith("pyproject.toml, beside code that is")
    project.write_text("[no TOML")
    assert Setup(sets=("sandbox=bwrap",)).read(target, {}).found.note == ""
    with pytest.raises(UsageError, match="is no TOML"):
        Setup().read(target, {})


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ("serve.store=memory", r"--set serve\.store: it is a setting of the server, for callyard serve"),
        ("pools.gpu.executors=3", r"--set: pools is a table, which only a settings file can give"),
        ("io.files=x", r"--set: io is a table, which only a settings file can give"),
        ("nope=3", r"--set: no setting 'nope'; there are \d+, such as executor_count, .*: --print-config of a command"),
        ("start_timeout=2", r"must be from 100 to 86400000, got 2, which is milliseconds"),
    ],
)
def test_a_pair_that_does_not_fit(target: Path, pair: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Setup(sets=(pair,)).read(target, {})


def test_the_number_of_executors_has_the_name_that_calls_in_python_give_it(target: Path) -> None:
    (target.parent / "callyard.toml").write_text("[worker]\nexecutors = 3\n")
    settings = Setup().read(target, {})
    assert (settings.config.executor_count, settings.given["executor_count"].origin) == (3, "callyard.toml:2")
    assert Setup().read(target, {"CALLYARD_EXECUTORS": "4"}).config.executor_count == 4
    assert Setup(sets=("executors=5",)).read(target, {}).config.executor_count == 5


def test_nothing_found_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Setup().read(None, {})
    assert settings.found.note == ""
    assert show_worker(settings).startswith(f"# settings file: no callyard.toml or [tool.callyard] in {tmp_path}\n")


def test_what_is_printed_is_a_settings_file_that_says_the_same(target: Path, tmp_path: Path) -> None:
    settings = Setup(sets=("restart_window=90s", "sandbox_memory=512MiB")).read(
        target, {"CALLYARD_EXECUTOR_COUNT": "3"}
    )
    printed = show_worker(settings)
    lines = printed.splitlines()
    assert lines[:4] == [
        "# settings file: callyard.toml",
        "",
        "[worker]",
        "executor_count = 3  # CALLYARD_EXECUTOR_COUNT",
    ]
    assert 'restart_window_ms = "90s"  # --set restart_window' in lines
    assert "max_restarts = 1  # callyard.toml:2" in lines
    assert 'cancel_grace_ms = "250ms"  # default' in lines
    assert "# scheduler_stall_timeout_ms is not set" in lines
    again = tmp_path / "again.toml"
    again.write_text(printed)
    assert SettingsFile.load(again).worker == {
        name: value for name in SettingsFile.load(again).worker if (value := getattr(settings.config, name)) is not None
    }
    assert set(SettingsFile.load(again).pools) == {"gpu", "big"}


@pytest.mark.requirement("D57")
@pytest.mark.parametrize("worker", ["", "drain_deadline = '9s'\n"])
def test_what_is_printed_of_a_server_is_what_its_worker_gets(target: Path, worker: str) -> None:
    file = target.parent / "callyard.toml"
    table = f"[worker]\nmax_restarts = 3\ntenant_weights = {{ acme = 3 }}\n{worker}[pools.gpu]\nexecutors = 2\n"
    file.write_text(f"[serve]\ndrain_deadline = '5s'\n{table}")
    serve = ServeConfig.read(file)
    printed = show_serve(Setup().read(target, {}), serve, {})
    again = target.parent / "again.toml"
    again.write_text(printed)
    assert ServeConfig.read(again).worker_config({}) == serve.worker_config({})
    assert "executor_nice = 5  # callyard serve\n" in printed
    assert ('drain_deadline_ms = "9s"' if worker else 'drain_deadline_ms = "5s"  # callyard.toml:2') in printed


def test_what_a_token_allows_is_printed(target: Path) -> None:
    file = target.parent / "callyard.toml"
    table = "tenant = 'acme'\ntools = ['read_*']\nowner = 'o'\nrate = '10/s'\nrunning_max = 5\n"
    secret = "claims = { role = 'clerk', share = 0.5, api_key = 'sesame' }\n"
    file.write_text(f"[serve.tokens.ci]\nhash = 'sha256:{'0' * 64}'\n{table}{secret}")
    printed = show_serve(Setup().read(target, {}), ServeConfig.read(file), {})
    assert "[serve.tokens.ci]  # callyard.toml\n" in printed
    assert tomllib.loads(printed)["serve"]["tokens"]["ci"] == {
        **tomllib.loads(table),
        "hash": "***",
        "claims": {"role": "clerk", "share": 0.5, "api_key": "***"},
    }


def test_no_secret_is_printed(target: Path) -> None:
    settings = Setup().read(target, {})
    serve = ServeConfig.read(target.parent / "callyard.toml")
    printed = show_serve(settings, serve, {"http": Given(None, "--http")})
    assert "sesame" not in printed
    assert "hunter2" not in printed
    tables = tomllib.loads(printed)
    assert tables["pools"]["gpu"]["environment"] == {"API_TOKEN": "***", "CUDA_VISIBLE_DEVICES": "{slot}"}
    assert tables["io"]["jsonrpc"]["prices"] == {"url": "https://me:***@example.com/rpc", "headers": {"X": "***"}}
    assert tables["serve"]["store"] == "redis://me:***@example.com/0"
    assert 'deadline_ms = "20s"  # callyard.toml:13' in printed


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        ("postgresql://u:p%40ss@h:5/d?sslmode=require", "postgresql://u:***@h:5/d?sslmode=require"),
        ("redis://:secret@h/0", "redis://:***@h/0"),
        ("postgres://u:a/b@c@h/d", "postgres://u:***@h/d"),
        ("host=h password='a b' user=u", "host=h password=*** user=u"),
        (
            {"GITHUB_PAT": "a", "SIGNING_KEY": "b", "OMP_PATH": "c"},
            {"GITHUB_PAT": "***", "SIGNING_KEY": "***", "OMP_PATH": "c"},
        ),
        ("https://h/x?api_key=abc&y=1", "https://h/x?api_key=***&y=1"),
        ("postgresql://h/d", "postgresql://h/d"),
        ({"password": "p", "n": 3}, {"password": "***", "n": 3}),
        ({"headers": {"A": "b", "C": ["d"]}}, {"headers": {"A": "***", "C": ["***"]}}),
        (["a://b:c@d"], ["a://b:***@d"]),
    ],
)
def test_masking(value: object, masked: object) -> None:
    assert mask(value) == masked
