from __future__ import annotations

import pytest

from callyard.errors import UsageError
from callyard.executor.options import Options, VersionMismatch, parse_options
from callyard.ids import ExecutorId
from callyard.wire.messages import PROTOCOL_VERSION

LEAST = ["--executor-id", "exec-1", "--protocol", str(PROTOCOL_VERSION), "--socket-fd", "7"]


@pytest.mark.requirement("X51")
def test_both_ways_to_write_a_flag_and_the_defaults() -> None:
    assert parse_options(LEAST) == Options(ExecutorId("exec-1"), PROTOCOL_VERSION, socket_fd=7)
    assert parse_options(
        [
            *("--executor-id=exec-2", f"--protocol={PROTOCOL_VERSION}", "--socket-path=/run/s=1"),
            *("--executor-max-inflight=16", "--executor-max-runnable", "8", "--capture-locals"),
            *("--mark-fd", "9", "--heartbeat-interval-ms=50", "--nice=5"),
        ]
    ) == Options(
        ExecutorId("exec-2"),
        PROTOCOL_VERSION,
        max_inflight=16,
        max_runnable=8,
        socket_path="/run/s=1",
        mark_fd=9,
        heartbeat_interval_ms=50,
        capture_locals=True,
        nice=5,
    )


@pytest.mark.requirement("X51")
@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION + 1, 0])
def test_version_comes_before_every_other_complaint(protocol: int) -> None:
    with pytest.raises(VersionMismatch, match=f"protocol {protocol}"):
        parse_options(["--unknown", "x", f"--protocol={protocol}", "--socket-fd", "nonsense"])


@pytest.mark.parametrize("value", ["0", "65537", "-1", "1e3", "", "٣"])
def test_numbers_have_a_range(value: str) -> None:
    with pytest.raises(UsageError, match=r"--executor-max-inflight: expected a whole number from 1 to 65536"):
        parse_options([*LEAST, f"--executor-max-inflight={value}"])
