"""Settings of the server: a TOML file with places in its errors, and the rule for addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from callyard.dispatch.dispatcher import Dispatcher
from callyard.errors import UsageError
from callyard.functions.registry import Registry
from callyard.policy.breaker import BreakerPolicy
from callyard.serve.config import HTTP, Address, ServeConfig, default_state_dir, gateway_of, read_serve_pairs
from callyard.serve.tokens import read_token
from callyard.settings import find_line

TOKEN = 'hash = "sha256:' + "a" * 64 + '"\ntenant = "acme"\n'


def read(tmp_path: Path, text: str) -> ServeConfig:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    return ServeConfig.read(path)


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        f"""
[serve]
http = true
admin = "[::1]:0"
state_dir = "state"
store = "keys/own.db"
deadline = "20s"
queue_wait_max = "1.5s"
kept = 1000
max_result = "2MiB"
body_bytes_max = 65536
allowed_hosts = ["example.com"]
headers = ["X-Request-Id"]
audit_file = "calls.jsonl"
audit_required = true
[serve.tokens.ci]
{TOKEN}tools = ["read_*"]
[worker]
executor_count = 3
[pools.gpu]
executors = 2
[io.files]
data = "data"
""",
    )
    assert config.http == HTTP
    assert config.admin == Address("::1", 0)
    assert config.state_dir == tmp_path / "state"
    assert config.store == str(tmp_path / "keys" / "own.db")
    assert (config.deadline_ms, config.queue_wait_ms_max, config.kept_ms) == (20_000, 1_500, 1_000)
    assert (config.max_result_bytes, config.body_bytes_max) == (2 << 20, 65_536)
    assert config.headers == ("x-request-id",)
    assert config.audit_file == tmp_path / "calls.jsonl"
    assert config.tokens["ci"].caller.tools == ("read_*",)
    worker = config.worker_config({"CALLYARD_EXECUTOR_COUNT": "7"})
    assert (worker.executor_count, worker.pools["gpu"].executors) == (7, 2), "a variable goes before the file"
    assert config.worker_config({}).executor_count == 3
    assert config.worker_config({}, executor_count=9).executor_count == 9
    assert config.io is not None
    assert config.io.files["data"].path == tmp_path / "data"


@pytest.mark.requirement("D55", "D57")
def test_defaults(tmp_path: Path) -> None:
    config = ServeConfig()
    dispatching = config.dispatcher()
    assert (config.deadline_ms, dispatching.queue_wait_ms_max, dispatching.attempt_min_ms) == (55_000, 10_000, 1_000)
    assert config.store == "sqlite"
    target = tmp_path / "functions.py"
    environ = {"XDG_STATE_HOME": str(tmp_path), "HOME": "/nowhere"}
    folder = config.folder_of(target, environ)
    assert folder.parent == tmp_path / "callyard"
    assert folder.name.startswith("functions-")
    package = config.folder_of(tmp_path / "shop" / "__init__.py", environ)
    assert package.name.startswith("shop-")
    other = default_state_dir(tmp_path / "elsewhere" / "functions.py", environ)
    assert other != folder  # two of one name do not share their keys
    assert default_state_dir(target, {"HOME": str(tmp_path), "XDG_STATE_HOME": "relative"}).parent == (
        tmp_path / ".local" / "state" / "callyard"
    )
    gateway = gateway_of(config, Dispatcher(Registry()))
    assert (gateway.jobs.limit, gateway.owner_max, gateway.deadline_ms) == (256, 64, 55_000)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("[serve]\nhttp = true\nspeed = 3\n", 3, "no setting 'serve.speed'; there are 34, such as http, admin"),
        ("[serve]\njobs_max = 0\n", 2, "jobs_max must be from 1"),
        ("[serve]\njobsmax = 5\n", 2, "no setting 'serve.jobsmax'; did you mean jobs_max"),
        ("[serve]\n\ndeadline = 'soon'\n", 3, "deadline must be a duration"),
        ("[serve]\ndeadline = '1s'\ndeadline_ms = 5\n", 3, "there twice"),
        ("[serve]\nhttp = 'nonsense:x'\n", 2, "expected an address"),
        ("[server]\n", 1, "no setting 'server'; did you mean serve?"),
        ("executor_count = 3\n", 1, "it is a setting of the table [worker]"),
        ("serve = 3\n", 1, "must be a table"),
        (f"[serve.tokens.a]\n{TOKEN}rate = 'x'\n", 4, "serve.tokens.a.rate"),
        (f"[serve.tokens.a]\n{TOKEN}[serve.tokens.b]\n{TOKEN}", 5, "the same token as serve.tokens.a"),
        ("[serve]\ntokens = 3\n", 2, "must be tables"),
        ("[worker]\nexecutor_count = 3\nspeed = 1\n", 3, "no setting 'worker.speed'"),
        ("[worker]\nexecutor_count = -1\n", 2, "executor_count must be"),
        ("[pools.gpu]\nexecutors = 1\nspeed = 1\n", 3, "no setting 'pools.gpu.speed'"),
        ("[io]\nspeed = 1\n", 1, "io.speed"),
        ("[serve]\naudit_required = true\n", None, "needs audit_file"),
        ("[serve\n", None, "is no TOML"),
    ],
)
def test_what_does_not_fit_is_told_with_file_and_line(tmp_path: Path, text: str, line: int | None, says: str) -> None:
    with pytest.raises(UsageError) as wrong:
        read(tmp_path, text)
    place = f"{tmp_path / 'serve.toml'}" + ("" if line is None else f":{line}:")
    assert str(wrong.value).startswith(place)
    assert says in str(wrong.value)


@pytest.mark.parametrize(("text", "value"), [("true", HTTP), ("false", None), ("127.0.0.1:1", Address("127.0.0.1", 1))])
def test_a_pair_says_where_to_listen_as_the_file_does(text: str, value: Address | None) -> None:
    assert read_serve_pairs([f"http={text}"], "--set")["http"].value == value
    with pytest.raises(UsageError, match="expected an address"):
        read_serve_pairs(["http=::1"], "--set")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        ServeConfig.read(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (("serve", "http"), 2),
        (("serve", "tokens", "a", "rate"), 6),
        (("serve", "tokens", "a", "owner"), 4),
        (("worker", "x.y"), 8),
        (("other",), None),
        ((), None),
    ],
)
def test_lines_are_found(setting: tuple[str, ...], line: int | None) -> None:
    text = '[serve]\nhttp = 1\n\n[serve.tokens."a"]  # one\nhash = ""\nrate = ""\n[worker]\n"x.y" = 1\n'
    assert find_line(text, setting) == line


# --- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address", "is_loopback"),
    [
        ("127.0.0.1:8700", Address("127.0.0.1", 8_700), True),
        ("127.9.9.9:0", Address("127.9.9.9", 0), True),
        ("localhost:1", Address("localhost", 1), True),
        ("[::1]:2", Address("::1", 2), True),
        ("0.0.0.0:3", Address("0.0.0.0", 3), False),
        ("[::]:4", Address("::", 4), False),
        ("example.com:5", Address("example.com", 5), False),
        ("localhost.example.com:5", Address("localhost.example.com", 5), False),
    ],
)
def test_addresses(text: str, address: Address, is_loopback: bool) -> None:
    assert Address.parse(text) == address
    assert address.is_loopback is is_loopback
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize("text", ["", "x", "1.2.3.4:", "1.2.3.4:65536", "::1:3", "a b:1", "127.0.0.1:-1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="expected an address"):
        Address.parse(text)


@pytest.mark.requirement("D36")
def test_two_gates_do_not_share_an_address() -> None:
    one = Address("127.0.0.1", 8_700)
    with pytest.raises(UsageError, match=r"http and admin are both 127\.0\.0\.1:8700: give each an address of its own"):
        ServeConfig(http=one, admin=one)
    anywhere = Address("127.0.0.1", 0)
    assert ServeConfig(http=anywhere, admin=anywhere).admin == anywhere


@pytest.mark.requirement("D36")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_no_other_machine_is_listened_to_without_a_token(host: str) -> None:
    with pytest.raises(UsageError, match="there is no token") as refused:
        ServeConfig(http=Address(host, 8_700))
    assert "callyard token new" in str(refused.value)
    token = read_token("a", {"hash": "sha256:" + "0" * 64, "tenant": "t"})
    assert ServeConfig(http=Address(host, 8_700), tokens={"a": token}).tokens
    assert ServeConfig(http=HTTP).http == HTTP


def test_the_breaker_can_be_set_and_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, "").dispatcher().breaker == BreakerPolicy(failures=5)
    assert read(tmp_path, "[serve]\nbreaker_failures = 40").dispatcher().breaker == BreakerPolicy(failures=40)
    assert read(tmp_path, "[serve]\nbreaker_failures = 0").dispatcher().breaker is None
