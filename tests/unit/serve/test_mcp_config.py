"""`callyard mcp-config`: each client's format, absolute paths, no secrets, and a file that keeps what it had."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from callyard.cli.app import app
from callyard.cli.mcp_config import find_callyard, find_file, merge_into
from callyard.errors import UsageError

COMMAND = str(Path(sys.executable).with_name("callyard"))
URL = "http://127.0.0.1:8700"


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my tools.py"
    path.write_text("")
    return path


def ask(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["mcp-config", *words])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refuse(*words: str) -> str:
    done = CliRunner().invoke(app, ["mcp-config", *words])
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


def test_stdio_for_each_client(target: Path) -> None:
    server = {"command": COMMAND, "args": ["serve", str(target)]}
    assert ask("my tools.py", "--client", "claude") == {"mcpServers": {"my-tools": server}}
    assert ask("my tools.py", "--client", "cursor") == {"mcpServers": {"my-tools": server}}
    assert ask("my tools.py", "--client", "vscode") == {"servers": {"my-tools": {"type": "stdio", **server}}}
    assert find_callyard().is_absolute()


def test_a_module_and_a_folder_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("shop/__init__.py", "shop/jobs.py", "project/src/yard/__init__.py", "bare/inner/jobs.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    for given, name, path in (
        ("shop.jobs", "shop-jobs", "shop/jobs.py"),
        ("shop/jobs.py", "jobs", "shop/jobs.py"),
        ("shop/", "shop", "shop"),
        ("project", "yard", "project/src/yard"),
    ):
        servers = ask(given)["mcpServers"]
        assert servers == {name: {"command": COMMAND, "args": ["serve", str(tmp_path / path)]}}, given
    assert "no module 'nosuch'" in refuse("nosuch.jobs")
    assert "is found from" in refuse("bare.inner.jobs")
    assert "up to its token" in refuse("shop.jobs:price")


def test_http_for_each_client_names_the_token_and_does_not_hold_it(target: Path) -> None:
    asked = [str(target), "--name", "yard", "--http", URL, "--token-env", "YARD_TOKEN", "--client"]
    url = f"{URL}/mcp"
    claude = ask(*asked, "claude")["mcpServers"]["yard"]
    assert claude == {"type": "http", "url": url, "headers": {"Authorization": "Bearer ${YARD_TOKEN}"}}
    cursor = ask(*asked, "cursor")["mcpServers"]["yard"]
    assert cursor == {"url": url, "headers": {"Authorization": "Bearer ${env:YARD_TOKEN}"}}
    vscode = ask(*asked, "vscode")
    assert vscode["servers"]["yard"]["headers"] == {"Authorization": "Bearer ${input:YARD_TOKEN}"}
    assert [(one["id"], one["password"]) for one in vscode["inputs"]] == [("YARD_TOKEN", True)]
    assert ask(str(target), "--http", "https://yard.example/tools/mcp")["mcpServers"]["my-tools"] == {
        "type": "http",
        "url": "https://yard.example/tools/mcp",
    }


def test_options_of_serve_are_checked_and_their_paths_made_absolute(target: Path) -> None:
    given = ["--executors", "2", "--config", "x.toml", "--state-dir=keys", "--sandbox", "auto", "--include", "*.json"]
    (server,) = ask(str(target), "--", *given)["mcpServers"].values()
    here = target.parent
    assert server["args"][2:] == [
        *("--executors", "2", "--config", str(here / "x.toml"), f"--state-dir={here / 'keys'}"),
        *("--sandbox", "auto", "--include", "*.json"),
    ]
    assert "No such option: --nope" in refuse(str(target), "--", "--nope")
    assert "got 'heavy'" in refuse(str(target), "--", "--sandbox", "heavy")
    assert "give its URL to mcp-config" in refuse(str(target), "--", "--http")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "nowhere.py does not exist: expected a Python file"),
        (["my tools.py", "--client", "emacs"], "claude, cursor, vscode, got 'emacs'"),
        (["my tools.py", "--name", "a b"], "--name is 1 to 64"),
        (["my tools.py", "--token-env", "X"], "--token-env goes with --http"),
        (["my tools.py", "--http", "localhost:8700"], "--http is where the server listens"),
        (["my tools.py", "--http", "http://me:hunter2@host/"], "--http holds no password"),
        (["my tools.py", "--http", URL, "--token-env", "cy_secret-token"], "is the name of a variable"),
        (["my tools.py", "--http", URL, "--", "--executors", "2"], "--executors goes to it"),
    ],
)
def test_what_is_wrong_is_said(target: Path, words: list[str], said: str) -> None:
    assert said in refuse(*words)


def test_nothing_is_written_unless_asked(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(target.parent / "home"))
    ask(str(target), "--client", "cursor")
    assert list(target.parent.iterdir()) == [target]
    done = CliRunner().invoke(app, ["mcp-config", str(target), "--client", "cursor", "--write"])
    assert (done.exit_code, done.stdout) == (0, ""), done.output
    written = json.loads((target.parent / "home" / ".cursor" / "mcp.json").read_text())
    assert list(written["mcpServers"]) == ["my-tools"]


def test_what_is_there_stays_and_is_copied_first(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    before = {
        "theme": "dark",
        "servers": {"other": {"command": "x"}, "yard": {"command": "old"}},
        "inputs": [{"id": "a"}],
    }
    path.write_text(json.dumps(before))
    path.chmod(0o600)
    wanted = {"servers": {"yard": {"command": "new"}}, "inputs": [{"id": "b"}]}
    backup = merge_into(path, wanted)
    assert backup is not None
    assert json.loads(backup.read_text()) == before
    assert json.loads(path.read_text()) == {
        "theme": "dark",
        "servers": {"other": {"command": "x"}, "yard": {"command": "new"}},
        "inputs": [{"id": "a"}, {"id": "b"}],
    }
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path, backup)] == [0o600, 0o600]
    assert merge_into(path, wanted) is None, "it has it already"
    another = merge_into(path, {"servers": {"third": {}}})
    assert another is not None
    assert another != backup, "a copy is never written over"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mcp.json", "mcp.json.bak", "mcp.json.bak-2"]


@pytest.mark.parametrize(
    "text", ['{"servers": {} // mine\n}', "[]", '{"servers": []}', '{"inputs": {}}', "\x00", "[" * 100_000]
)
def test_a_file_that_is_not_understood_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="left alone"):
        merge_into(path, {"servers": {"yard": {}}, "inputs": [{"id": "a"}]})
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "mcp.json"
    real.write_text("{}")
    link.symlink_to(real)
    merge_into(link, {"servers": {"yard": {}}})
    assert link.is_symlink()
    assert json.loads(real.read_text()) == {"servers": {"yard": {}}}


def test_where_each_client_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = {"HOME": "/home/me"}
    name = "Claude/claude_desktop_config.json"
    mac = find_file("claude", http=False, environ=home, platform="darwin")
    assert mac == Path("/home/me/Library/Application Support") / name
    assert find_file("claude", http=False, environ=home, platform="linux") == Path("/home/me/.config") / name
    assert find_file("claude", http=True, environ=home) == tmp_path / ".mcp.json"
    assert find_file("cursor", http=True, environ=home) == Path("/home/me/.cursor/mcp.json")
    assert find_file("vscode", http=False, environ=home) == tmp_path / ".vscode" / "mcp.json"
