"""IO of user functions through a real worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from callyard import Worker

FUNCTIONS = """
from callyard import files, function


@function
def piece(offset: int, length: int) -> int:
    return len(files.read("data/large", offset=offset, length=length))
"""


@pytest.mark.requirement("X42")
@pytest.mark.requirement("X34")
async def test_many_large_answers_at_once_are_no_sign_of_a_peer_that_stopped_reading(tmp_path: Path) -> None:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    root = tmp_path / "root"
    root.mkdir()
    with (root / "large").open("wb") as file:
        file.truncate(12 * 1024 * 1024)
    rows = [{"offset": i, "length": 5_000_000} for i in range(20)]
    async with Worker(path, executors=1, io={"files": {"data": str(root)}}) as worker:
        results = [result.unwrap() async for result in worker.map("piece", rows)]
        assert results == [5_000_000] * 20
        assert await worker.call("piece", {"offset": 0, "length": 8 * 1024 * 1024}) == 8 * 1024 * 1024
