"""The SDK outside an executor: functions stay callable in tests and scripts."""

from __future__ import annotations

import pytest

from callyard import sdk


def test_context_has_defaults() -> None:
    assert sdk.context() == sdk.CallInfo()
    assert (sdk.context().attempt, sdk.context().tenant, sdk.context().deadline_remaining_ms) == (1, "default", None)


def test_sleep_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    sdk.sleep(0)
    sdk.sleep(1.5)
    assert slept == [0, 1.5]


@pytest.mark.parametrize("seconds", [-1, -0.001, float("nan")])
def test_what_is_no_duration_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="sleep length"):
        sdk.sleep(seconds)


def test_a_runtime_takes_over() -> None:
    class Runtime:
        slept: float | None = None

        def sleep(self, seconds: float) -> None:
            self.slept = seconds

        def call_info(self) -> sdk.CallInfo | None:
            return sdk.CallInfo(owner="me") if self.slept else None

    runtime = Runtime()
    sdk.set_runtime(runtime)
    try:
        assert sdk.context() == sdk.CallInfo()
        sdk.sleep(2)
        assert runtime.slept == 2
        assert sdk.context().owner == "me"
    finally:
        sdk.set_runtime(None)
