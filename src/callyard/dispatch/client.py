"""Questions of running calls to whoever made them. While one is open, no time of its call runs.

Source: tool-dispatch D9, D40; docs/design/serve.md, "Questions to the client".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

from callyard.clock import Timers
from callyard.dispatch.allowance import Allowance
from callyard.dispatch.call import Alarm, Call
from callyard.errors import ErrorKind
from callyard.functions.ports import AskCallback, AskRefused

_log: Final = logging.getLogger("callyard.dispatch")


class Client:
    """Whom the questions of a call go to, and those of the calls nested in it."""

    __slots__ = ("_is_gone", "_on_ask", "_open", "_timeout_ms")

    def __init__(self, on_ask: AskCallback, timeout_ms: int) -> None:
        self._on_ask = on_ask
        self._timeout_ms = timeout_ms
        self._open: dict[_Question, None] = {}
        self._is_gone = False

    async def ask(self, call: Call, kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """The client's answer. Raises `AskRefused`."""
        if self._is_gone:
            raise AskRefused(ErrorKind.UNAVAILABLE, f"{kind}: {_GONE}")
        asking = asyncio.ensure_future(self._put(kind, params))
        question = _Question(call.timers, call)
        self._open[question] = None
        asking.add_done_callback(question.wake)
        until_ms = call.timers.now_ms() + self._timeout_ms
        held = list(_clocks_of(call))
        for clock in held:
            clock.hold(call.timers.now_ms())
        try:
            while not asking.done():
                if question.refusal is not None:
                    raise AskRefused(question.refusal[0], f"{kind}: {question.refusal[1]}")
                if call.timers.now_ms() >= until_ms:
                    raise AskRefused(ErrorKind.DEADLINE, f"{kind} was not answered within {self._timeout_ms} ms")
                await question.pause(until_ms)
            answer = asking.result()
            if isinstance(answer, AskRefused):
                raise answer
            return answer
        finally:
            asking.cancel()
            del self._open[question]
            for clock in held:
                clock.go_on(call.timers.now_ms())

    async def _put(self, kind: str, params: Mapping[str, Any]) -> Mapping[str, Any] | AskRefused:
        """Nothing that it raises is lost, or taken for the caller's own cancellation."""
        try:
            return await self._on_ask(kind, params)
        except AskRefused as refused:
            return refused
        except asyncio.CancelledError:
            return AskRefused(ErrorKind.CANCELLED, f"{kind}: the question was withdrawn")
        except Exception:  # noqa: BLE001 - logged; its text is not the function's to see
            _log.exception("a question (%s) could not be put", kind)
            return AskRefused(ErrorKind.INTERNAL, f"{kind}: the question could not be put")

    def leave(self) -> None:
        """It is gone: what is open is refused, and what comes."""
        self._is_gone = True
        for question in self._open:
            question.refuse(ErrorKind.UNAVAILABLE, _GONE)

    def end_attempt(self, call: Call) -> None:
        """What the attempt left open, in a task that it left behind, nobody answers."""
        for question in self._open:
            if question.asker is call:
                question.refuse(ErrorKind.CANCELLED, "its call has ended")


_GONE: Final = "the client has gone"


class _Question(Alarm):
    """One that is open."""

    __slots__ = ("asker", "refusal")

    def __init__(self, timers: Timers, asker: Call) -> None:
        super().__init__(timers)
        self.asker = asker
        self.refusal: tuple[ErrorKind, str] | None = None

    def refuse(self, kind: ErrorKind, message: str) -> None:
        self.refusal = kind, message
        self.wake()


def _clocks_of(call: Call) -> Iterator[Call | Allowance]:
    """What must not run while the call waits for an answer: its own time, that of the calls it is nested in, and the
    wall limits of their allowances, each once."""
    above: Call | None = call
    allowances: dict[Allowance, None] = {}
    while above is not None:
        yield above
        if above.allowance is not None:
            allowances[above.allowance] = None
        above = above.caller
    yield from allowances
