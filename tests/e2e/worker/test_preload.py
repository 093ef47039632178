"""Executors that have loaded the code before a call comes."""

from __future__ import annotations

from pathlib import Path

from callyard.worker.worker import Worker
from tests.e2e.processes import wait_until


async def test_no_call_is_the_first_to_load_the_file(tmp_path: Path) -> None:
    loads = tmp_path / "loads"
    target = tmp_path / "slow.py"
    target.write_text(
        "import os\nfrom callyard import function\n"
        f"with open({str(loads)!r}, 'a') as file:\n    file.write(f'{{os.getpid()}}\\n')\n"
        "@function\ndef pid() -> int:\n    return os.getpid()\n"
    )
    async with Worker(target, executors=3, spare_executors=0) as worker:
        await worker.preload()
        wait_until(lambda: len(loads.read_text().split()) == 3, "each executor has loaded it")
        assert await worker.call("pid") in {int(pid) for pid in loads.read_text().split()}
        assert len(loads.read_text().split()) == 3
