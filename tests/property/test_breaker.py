"""The breaker beside a naive model that keeps every verdict there ever was."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from callyard.policy.breaker import Allowed, Breaker, BreakerPolicy, BreakerState, Refused


class Model:
    """As the requirement says it: no epochs, but for each call the moves of the breaker since it was let in."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self.policy = policy
        self.moves: list[tuple[str, int]] = []
        """Every opening, probe, return of a probe and closing, with its instant."""
        self.verdicts: list[int] = []
        """Failures that counted since the last closing."""
        self.failed_probes = 0

    @property
    def state(self) -> str:
        for name, _ in reversed(self.moves):
            return {"opened": "open", "probe": "half_open", "returned": "half_open", "closed": "closed"}[name]
        return "closed"

    @property
    def probe_is_out(self) -> bool:
        return bool(self.moves) and self.moves[-1][0] == "probe"

    @property
    def cool_down_ms(self) -> int:
        wait_ms = self.policy.open_ms
        for _ in range(self.failed_probes):
            wait_ms = min(self.policy.open_ms_max, wait_ms * 2)
        return wait_ms

    def may_pass(self, now_ms: int) -> bool:
        if self.state == "closed":
            return True
        if self.state == "open":
            return now_ms >= self.moves[-1][1] + self.cool_down_ms
        return not self.probe_is_out

    def failed(self, now_ms: int) -> bool:
        """A verdict of a call that was let in since the last move. Returns whether it opened the breaker."""
        if self.probe_is_out:
            self.failed_probes += 1
        else:
            self.verdicts.append(now_ms)
            recent = [at_ms for at_ms in self.verdicts if at_ms > now_ms - self.policy.window_ms]
            if len(recent) < self.policy.failures:
                return False
        self.moves.append(("opened", now_ms))
        self.verdicts.clear()
        return True


class BreakerMachine(RuleBasedStateMachine):
    calls: Bundle[tuple[Allowed, int]] = Bundle("calls")
    """What each was given, and how many moves there had been."""

    @initialize(failures=st.integers(1, 4), window_ms=st.integers(1, 60))
    def start(self, failures: int, window_ms: int) -> None:
        policy = BreakerPolicy(failures=failures, window_ms=window_ms, open_ms=20, open_ms_max=90)
        self.breaker, self.model, self.now_ms = Breaker(policy), Model(policy), 0

    @rule(duration_ms=st.sampled_from([0, 1, 5, 19, 20, 40, 100]))
    def wait(self, duration_ms: int) -> None:
        self.now_ms += duration_ms

    def ask(self, held: Allowed | None) -> tuple[Allowed, int] | None:
        model = self.model
        may_pass = model.may_pass(self.now_ms)
        state = model.state
        peeked, answer = self.breaker.peek(self.now_ms), self.breaker.ask(self.now_ms, held)
        assert (peeked is None) is may_pass
        if not may_pass:
            assert isinstance(answer, Refused)
            assert answer.retry_after_ms > 0
            if state == "open":
                assert self.now_ms + answer.retry_after_ms == model.moves[-1][1] + model.cool_down_ms
            return None
        assert isinstance(answer, Allowed)
        assert answer.probe is (state != "closed")
        assert (answer.entered is BreakerState.HALF_OPEN) is (state == "open")
        if state != "closed":
            model.moves.append(("probe", self.now_ms))
        return answer, len(model.moves)

    @rule(target=calls)
    def begin(self) -> object:
        return self.ask(None)

    @rule(target=calls, call=consumes(calls))
    def try_again(self, call: tuple[Allowed, int] | None) -> object:
        if call is None:
            return self.ask(None)
        if call[0].probe and call[1] == len(self.model.moves):
            again = self.breaker.ask(self.now_ms, call[0])
            assert isinstance(again, Allowed)
            assert again.entered is None
            return again, call[1]
        return self.ask(call[0])

    @rule(call=consumes(calls), verdict=st.sampled_from(["succeeded", "failed", "none"]))
    def end(self, call: tuple[Allowed, int] | None, verdict: str) -> None:
        if call is None:
            return
        held, moves = call
        model = self.model
        counts = moves == len(model.moves)
        if verdict == "failed":
            entered = self.breaker.failed(held, self.now_ms)
            opened = counts and model.failed(self.now_ms)
            assert (entered is BreakerState.OPEN) is opened
        elif verdict == "succeeded":
            entered = self.breaker.succeeded(held)
            assert (entered is BreakerState.CLOSED) is (counts and held.probe)
            if counts and held.probe:
                model.moves.append(("closed", self.now_ms))
                model.failed_probes = 0
        else:
            self.breaker.give_back(held)
            if counts and held.probe:
                model.moves.append(("returned", self.now_ms))

    @invariant()
    def one_probe(self) -> None:
        if not hasattr(self, "breaker"):
            return
        assert self.breaker.state.value == self.model.state
        assert self.breaker._probing is self.model.probe_is_out
        assert len(self.breaker._failed_at_ms) <= self.breaker._policy.failures


TestBreaker = pytest.mark.requirement("D28")(BreakerMachine.TestCase)
TestBreaker.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
