"""Sockets that take a flow state, and do not always do it well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from callyard.transport.port import FlowResult, FlowState


class Socket:
    """Records what it is told. `held`: its setter stands until `let_go`."""

    def __init__(self, name: str = "mesh", *, held: bool = False) -> None:
        self._name = name
        self.calls: list[FlowState] = []
        """As they began."""
        self.state: FlowState | None = None
        self.results: list[FlowResult | BaseException] = []
        """For the next setters; then OK."""
        self.held = held
        self.inside = 0
        self.on_call: Callable[[FlowState], Awaitable[None]] | None = None
        self._go = asyncio.Event()

    @property
    def name(self) -> str:
        return self._name

    def let_go(self) -> None:
        self.held = False
        self._go.set()

    async def set_receive_flow_state(self, state: FlowState) -> FlowResult:
        assert self.inside == 0, "two setters of one socket at a time"
        self.inside += 1
        try:
            self.calls.append(state)
            if self.on_call is not None:
                await self.on_call(state)
            while self.held:
                self._go.clear()
                await self._go.wait()
            result = self.results.pop(0) if self.results else FlowResult.OK
            if isinstance(result, BaseException):
                raise result
            if result is FlowResult.OK:
                self.state = state
            return result
        finally:
            self.inside -= 1
