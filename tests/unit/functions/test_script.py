"""The block of a script that names its packages."""

from __future__ import annotations

import pytest

from callyard.errors import UsageError
from callyard.functions.script import Script, read_script


def block(*lines: str) -> bytes:
    return "\n".join(
        ["import os", "# /// script", *(f"# {line}".rstrip() for line in lines), "# ///", "x = 1"]
    ).encode()


def test_dependencies_and_python_are_read() -> None:
    said = block('requires-python = ">=3.11"', "dependencies = [", '  "httpx>=1",', "", '  "rich",', "]")
    assert read_script(said, "f.py") == Script(("httpx>=1", "rich"), ">=3.11")
    assert read_script(said.replace(b"\n", b"\r\n"), "f.py") == Script(("httpx>=1", "rich"), ">=3.11")


@pytest.mark.parametrize(
    "source", [b"", b"x = 1\n", b"# /// script\nx = 1\n", b"# /// other\n# a = 1\n# ///\n", b"\xff"]
)
def test_a_file_without_one_names_nothing(source: bytes) -> None:
    assert read_script(source, "f.py") == Script()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (block("dependencies = ["), r"f\.py: the block `# /// script` is no TOML"),
        (block('dependencies = "httpx"'), "expected dependencies"),
        (block("dependencies = [1]"), "expected dependencies"),
        (block("requires-python = 3"), "expected dependencies"),
        (block("dependencies = []") + b"\n" + block("dependencies = []"), "has 2 blocks"),
    ],
)
def test_a_wrong_block_is_told(source: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_script(source, "f.py")
