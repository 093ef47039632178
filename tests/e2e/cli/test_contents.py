"""`call`, `run` and `list` of functions that return files, and of prompts and resources; real executors."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.e2e.cli.shell import Done, Terminal, parse_lines, run

SOURCE = '''
    from typing import Literal
    from callyard import File, Image, Message, ResourceLink, call, function, prompt, resource

    GIF = b"GIF89a" + bytes(30)

    @function(title="A chart")
    def chart() -> Image:
        return Image(GIF, name="../chart.gif")

    @function
    def report() -> list[str | Image | File | ResourceLink]:
        return ["done", Image(GIF), File(b"a,b", "text/csv", name="rows.csv"), ResourceLink("test://more")]

    @function
    def framed() -> list[str | Image]:
        image = call(chart)
        assert isinstance(image, Image) and call("chart")["callyard.content"][0]["type"] == "image"
        return ["framed", image]

    @function
    def hidden() -> dict:
        return {"image": Image(GIF)}

    @function(max_result_bytes=50)
    def large() -> Image:
        return Image(GIF)

    def names(value: str) -> list[str]:
        return [value + "a"]

    @prompt(complete={"name": names})
    def greet(name: str, times: int = 1):
        """Say hello."""
        return [f"hello {name}"] * times + [Message("assistant", "hello you")]

    @resource("test://items/{id}", mime_type="text/html")
    def item(id: int) -> str | None:
        return f"<b>{id + 1}</b>" if id else None
'''
GIF = b"GIF89a" + bytes(30)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "files.py"
    path.write_text(textwrap.dedent(SOURCE))
    return path


def call(target: Path, function: str, *words: str | Path) -> Done:
    return run("call", f"{target}:{function}", *words)


def test_the_bytes_of_a_file_go_where_they_are_asked_for(target: Path, tmp_path: Path) -> None:
    output = tmp_path / "chart.gif"
    done = call(target, "chart", "-o", output)
    assert (done.status, done.out) == (0, "")
    assert f"{output}: 36 B, image/gif" in done.err
    assert output.read_bytes() == GIF
    folder = tmp_path / "out"
    folder.mkdir()
    assert call(target, "report", "-o", folder).status == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"image-1.gif": GIF, "rows.csv": b"a,b"}
    assert call(target, "chart", "-o", folder).status == 0
    assert (folder / "chart.gif").read_bytes() == GIF  # the name is the function's, the folder is not


def test_a_result_that_has_no_place_is_not_lost(target: Path, tmp_path: Path) -> None:
    done = call(target, "report", "-o", tmp_path / "one")
    assert done.status == 2
    assert "the result has 2 files (image-1.gif, rows.csv): give a folder that is there with -o" in done.err
    assert json.loads(done.out)["callyard.content"][0] == {"type": "text", "text": "done"}
    before = call(target, "chart", "-o", tmp_path / "nowhere" / "x")
    assert before.status == 2
    assert "there is no folder" in before.err


def test_without_a_place_contents_are_tagged_json(target: Path) -> None:
    done = call(target, "framed")
    assert done.status == 0, done.err
    text, image = json.loads(done.out)["callyard.content"]
    assert text == {"type": "text", "text": "framed"}
    assert (image["type"], image["mime_type"], image["name"]) == ("image", "image/gif", "../chart.gif")


@pytest.mark.requirement("D26")
def test_contents_inside_of_values_and_large_ones_are_kind_result(target: Path) -> None:
    hidden, large = call(target, "hidden"), call(target, "large")
    assert (hidden.status, large.status) == (1, 1)
    assert (
        "result (its result cannot be sent): /image: callyard.Image has no JSON form: return it by itself" in hidden.err
    )
    assert "exceeds max_result_bytes=50" in large.err


def test_prompts_resources_and_completers_can_be_called(target: Path) -> None:
    messages = json.loads(call(target, "greet", "name=ann", "times=2").out)["callyard.messages"]
    assert [(m["role"], m["content"]["text"]) for m in messages] == [
        ("user", "hello ann"),
        ("user", "hello ann"),
        ("assistant", "hello you"),
    ]
    assert json.loads(call(target, "item", "id=4").out) == {
        "callyard.content": [{"type": "file", "text": "<b>5</b>", "mime_type": "text/html"}]
    }
    assert call(target, "item", "id=0").out == "null\n"
    assert json.loads(call(target, "names", "value=b").out) == ["ba"]
    wrong = call(target, "item", "id=x")
    assert (wrong.status, wrong.out) == (1, "")
    assert "/id: expected an integer" in wrong.err


def test_list_shows_roles(target: Path) -> None:
    shown = run("list", target).out
    assert "greet(name: str, times: int = 1)  [prompt]\n    Say hello.\n" in shown
    assert "item(id: int) -> str | None  [resource test://items/{id}]" in shown
    assert "names(value: str) -> list[str]  [completer]" in shown
    assert "chart() -> Image\n    A chart\n" in shown
    found = {spec["name"]: spec for spec in json.loads(run("list", "--json", target).out)["functions"]}
    assert found["greet"]["role"] == "prompt"
    assert found["greet"]["completions"] == {"name": {"function": "names"}}
    assert (found["item"]["uri"], found["item"]["mime_type"]) == ("test://items/{id}", "text/html")


def test_a_call_list_of_a_resource(target: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls.jsonl"
    calls.write_text('{"id": "1"}\n{"id": "no"}\n')
    good, bad = parse_lines(run("run", f"{target}:item", calls, "-o", "-").out)
    assert good["output"]["callyard.content"][0]["text"] == "<b>2</b>"
    assert bad["error"]["kind"] == "schema"


def test_a_terminal_is_told_what_came(target: Path) -> None:
    shell = Terminal(["call", f"{target}:report"])
    assert shell.wait() == 0
    assert [line for line in shell.lines if line] == [
        "done",
        "[image, image/gif, 36 B]",
        "a,b",
        "[link test://more]",
        "save with: -o image-1.gif",
    ]
