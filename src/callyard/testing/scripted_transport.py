"""A transport in memory, for hosts: each source says what it is told to say, and every call is on record.

    transport = ScriptedTransport()
    peer = transport.add_source("peer-1", SourceKind.MESH)
    peer.one_way("cart/42", b"{}", count=3)                     # three records, and their readable signals
    peer.endless(lambda n: peer.record(target="cart/42"))       # and then as many as are taken
    transport.on_start = lambda outgoing: HOLD                  # operations wait, until transport.started[0].accept()
    assert transport.counts["take"] == 0

Nothing here waits, polls or knows of jobs: it is `callyard.transport.port.Transport` and nothing more.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Final, NamedTuple, TypeAlias

from callyard.transport.port import (
    Completion,
    FlowResult,
    FlowState,
    FlowTarget,
    HeadKind,
    Outgoing,
    Record,
    RecordKind,
    SourceId,
    SourceKind,
    TransportRefused,
)

FRAME_COST_BYTES: Final = 64
"""What a frame is charged beside its payload."""

Item: TypeAlias = Record | Completion


class Call(NamedTuple):
    """One call that a host made."""

    name: str
    """The method's name; `set_receive_flow_state` for a flow target's."""
    about: str = ""
    """The source, the operation's target, or the flow target."""


class Hold:
    """The answer to `start` that leaves the operation running, until the test ends it or for ever."""


HOLD: Final = Hold()


class Started:
    """One operation that was started. The caller's wait may be cancelled: the operation goes on, as on a socket."""

    def __init__(self, outgoing: Outgoing) -> None:
        self.outgoing = outgoing
        self.outcome = "running"
        """`running`, `accepted`, or why it was refused."""
        self.wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def accept(self) -> None:
        """The transport's queue took it. Nothing happens when it has ended."""
        if self.outcome == "running":
            self.outcome = "accepted"
            if not self.wait.done():
                self.wait.set_result(None)

    def refuse(self, reason: str) -> None:
        """`not_found`, `not_connected`, `timeout` or `terminated`. Nothing happens when it has ended."""
        if self.outcome == "running":
            self.outcome = reason
            if not self.wait.done():
                self.wait.set_exception(TransportRefused(reason))
                self.wait.exception()  # a caller that has gone away is no error of the loop's


class ScriptedFlowTarget:
    """A socket that takes a flow state. `on_set` makes it fail, hang, call back or be slow."""

    def __init__(self, transport: ScriptedTransport, name: str) -> None:
        self._transport = transport
        self._name = name
        self.calls: list[FlowState] = []
        """What was asked for, when the call began."""
        self.applied: list[FlowState] = []
        """What ended with OK, in the order of the ends."""
        self.on_set: Callable[[FlowState], FlowResult | Awaitable[FlowResult]] = lambda state: FlowResult.OK
        """May raise, call back, or return what is awaited: a future never done is a setter that hangs."""

    @property
    def name(self) -> str:
        return self._name

    async def set_receive_flow_state(self, state: FlowState) -> FlowResult:
        self._transport.note("set_receive_flow_state", self._name)
        self.calls.append(state)
        answer = self.on_set(state)
        result = await answer if isawaitable(answer) else answer
        if result is FlowResult.OK:
            self.applied.append(state)
        return result


class ScriptedSource:
    """One peer, session or subscriber. A mesh peer's completions come by a line of their own, all else by one FIFO."""

    def __init__(self, transport: ScriptedTransport, source: SourceId, kind: SourceKind) -> None:
        self._transport = transport
        self.id = source
        self.kind = kind
        self.closed = False
        self.taken = 0
        """Ordinary records taken by the host."""
        self.completions_taken = 0
        self._fifo: deque[Item] = deque()
        self._completion_line: deque[Completion] = deque()
        self._make: Callable[[int], Item] | None = None
        self._made = 0
        self._make_count: int | None = None
        self._sequence = 0

    # What the script says.

    def record(self, kind: RecordKind = RecordKind.ONE_WAY, target: str = "", **fields: Any) -> Record:
        """A record of this source with its next sequence number; it is not pushed."""
        self._sequence += 1
        return Record(kind=kind, source=self.id, target=target, sequence=self._sequence, **fields)

    def one_way(self, target: str = "", payload: bytes = b"", *, count: int = 1, **fields: Any) -> None:
        self._repeat(count, lambda: self.record(RecordKind.ONE_WAY, target, payload=payload, **fields))

    def request(self, target: str = "", payload: bytes = b"", *, operation_id: int, **fields: Any) -> None:
        self.push(self.record(RecordKind.REQUEST, target, payload=payload, operation_id=operation_id, **fields))

    def publish(self, target: str = "", payload: bytes = b"", *, count: int = 1, **fields: Any) -> None:
        self._repeat(count, lambda: self.record(RecordKind.PUBLISH, target, payload=payload, **fields))

    def control(self, message_type: str = "heartbeat", *, count: int = 1, **fields: Any) -> None:
        self._repeat(count, lambda: self.record(RecordKind.CONTROL, message_type=message_type, **fields))

    def malformed(self, *, operation_id: int = 0, **fields: Any) -> None:
        """With an operation id: a request, of which so much could be read."""
        self.push(self.record(RecordKind.MALFORMED, operation_id=operation_id, **fields))

    def complete(self, operation_id: int, payload: bytes = b"", *, error: str = "", message: str = "") -> None:
        """A reply to an operation of the host's, or an error reply."""
        self.push(Completion(operation_id=operation_id, payload=payload, error=error, message=message))

    def push(self, *items: Item, signal: bool = True) -> None:
        """Put items at the tail. A source that is closed takes none (LookupError)."""
        self._transport.check_open(self.id)
        for item in items:
            own_line = isinstance(item, Completion) and self.kind is SourceKind.MESH
            if own_line:
                assert isinstance(item, Completion)
                self._completion_line.append(item)
            else:
                self._fifo.append(item)
        if signal:
            self.signal(self._transport.signals_per_push)

    def endless(self, make: Callable[[int], Item], count: int | None = None, *, signal: bool = True) -> None:
        """After what was pushed come `make(0)`, `make(1)`, ..., each made at the head; `count`: so many."""
        self._make, self._made, self._make_count = make, 0, count
        if signal:
            self.signal(self._transport.signals_per_push)

    def signal(self, times: int = 1) -> None:
        """Say that there is something to read, true or not, as often as told."""
        for _ in range(times):
            self._transport.signal(self.id)

    def close(self) -> None:
        """The peer is gone, with what it had sent and nobody took. A second time does nothing."""
        self._transport.close_source(self.id)

    # What it holds.

    @property
    def unread(self) -> int:
        """Items that were pushed and not taken; of an endless tail, the one at the head at most."""
        return len(self._fifo) + len(self._completion_line)

    @property
    def accounted_bytes(self) -> int:
        return sum(charge(item) for item in self._fifo)

    @property
    def completion_accounted_bytes(self) -> int:
        return sum(charge(item) for item in self._completion_line)

    def head(self) -> Item | None:
        if self._completion_line:
            return self._completion_line[0]
        if not self._fifo and self._make is not None and self._made != self._make_count:
            self._fifo.append(self._make(self._made))
            self._made += 1
        return self._fifo[0] if self._fifo else None

    def pop(self) -> Item:
        return self._completion_line.popleft() if self._completion_line else self._fifo.popleft()

    def clear(self) -> None:
        self.closed = True
        self._fifo.clear()
        self._completion_line.clear()
        self._make = None

    def _repeat(self, count: int, make: Callable[[], Record]) -> None:
        self.push(*[make() for _ in range(count)])


class ScriptedTransport:
    """`callyard.transport.port.Transport` by script.

    A source that is not there has nothing at its head; taking from it, or what is not at the head, is a mistake of the
    host's: LookupError, ValueError.
    """

    def __init__(self, *, calls_max: int = 10_000) -> None:
        self.calls: deque[Call] = deque(maxlen=calls_max)
        """The last calls, oldest first."""
        self.counts: Counter[str] = Counter()
        """How often each method was called."""
        self.counts_by_source: Counter[Call] = Counter()
        self.before_call: Callable[[Call], None] | None = None
        """A hook inside every call, before it does anything: there a test moves the clock or closes a source."""
        self.on_signal: Callable[[SourceId], int] = lambda source: 1
        """How often to pass a readable signal on: 0 swallows it."""
        self.signals_per_push = 1
        self.on_start: Callable[[Outgoing], str | Hold | None] = lambda outgoing: None
        """What becomes of an operation: None accepts it, a reason refuses it, HOLD leaves it running. It may raise."""
        self.started: list[Started] = []
        self.figures: dict[str, int] = {"effective_budget": 0, "applied": 0, "in_flight": 0, "blocked_ratio": 0}
        """Byte figures of `snapshot` that do not come from the sources. A name set here wins over what is counted."""
        self.discarded = 0
        """Items that a closing source took with it."""
        self.closed = False
        self._sources: dict[SourceId, ScriptedSource] = {}
        self._flow_targets: dict[str, ScriptedFlowTarget] = {}
        self._on_readable: Callable[[SourceId], None] | None = None
        self._on_closed: Callable[[SourceId], None] | None = None

    # The script's side.

    def add_source(self, source: str, kind: SourceKind = SourceKind.MESH) -> ScriptedSource:
        """A new source, empty. An id comes back only after its source was closed."""
        source_id = SourceId(source)
        if source_id in self._sources:
            raise ValueError(f"source {source!r} is there already: close it first")
        added = self._sources[source_id] = ScriptedSource(self, source_id, kind)
        return added

    def source(self, source: str) -> ScriptedSource:
        self.check_open(SourceId(source))
        return self._sources[SourceId(source)]

    def close_source(self, source: SourceId) -> None:
        closing = self._sources.pop(source, None)
        if closing is None:
            return
        self.discarded += closing.unread
        closing.clear()
        if self._on_closed is not None:
            self._on_closed(source)

    def signal(self, source: SourceId) -> None:
        for _ in range(self.on_signal(source)):
            if self._on_readable is not None:
                self._on_readable(source)

    def add_flow_target(self, name: str) -> ScriptedFlowTarget:
        target = self._flow_targets[name] = ScriptedFlowTarget(self, name)
        return target

    def remove_flow_target(self, name: str) -> None:
        del self._flow_targets[name]

    def accepted(self) -> list[Outgoing]:
        """What was really sent, in the order of the starts."""
        return [started.outgoing for started in self.started if started.outcome == "accepted"]

    def takes(self, source: str) -> int:
        """How often `take` was called for a source."""
        return self.counts_by_source[Call("take", source)]

    def note(self, name: str, about: str = "") -> None:
        call = Call(name, about)
        self.calls.append(call)
        self.counts[name] += 1
        self.counts_by_source[call] += 1
        if self.before_call is not None:
            self.before_call(call)

    def check_open(self, source: SourceId) -> None:
        if source not in self._sources:
            raise LookupError(f"no source {source!r}: it was never added, or it is closed")

    # The host's side: `Transport`.

    def attach(self, on_readable: Callable[[SourceId], None], on_closed: Callable[[SourceId], None]) -> None:
        self.note("attach")
        self._on_readable, self._on_closed = on_readable, on_closed

    def sources(self) -> list[SourceId]:
        self.note("sources")
        return list(self._sources)

    def kind_of(self, source: SourceId) -> SourceKind:
        self.note("kind_of", source)
        self.check_open(source)
        return self._sources[source].kind

    def head_kind(self, source: SourceId) -> HeadKind:
        self.note("head_kind", source)
        found = self._sources.get(source)
        return HeadKind.NONE if found is None else head_kind_of(found.head())

    def take(self, source: SourceId) -> Record:
        self.note("take", source)
        self.check_open(source)
        found = self._sources[source]
        head = found.head()
        if not isinstance(head, Record):
            raise ValueError(f"take from {source!r}: {head_kind_of(head).value} stands at its head, not a record")
        found.pop()
        found.taken += 1
        return head

    def take_completion(self, source: SourceId) -> Completion:
        self.note("take_completion", source)
        self.check_open(source)
        found = self._sources[source]
        head = found.head()
        if not isinstance(head, Completion):
            raise ValueError(f"take_completion from {source!r}: {head_kind_of(head).value} stands at its head")
        found.pop()
        found.completions_taken += 1
        return head

    def start(self, outgoing: Outgoing) -> Awaitable[None]:
        self.note("start", outgoing.target)
        started = Started(outgoing)
        self.started.append(started)
        answer = "terminated" if self.closed else self.on_start(outgoing)
        if answer is None:
            started.accept()
        elif isinstance(answer, str):
            started.refuse(answer)
        return started.wait

    def flow_targets(self) -> list[FlowTarget]:
        self.note("flow_targets")
        return list(self._flow_targets.values())

    def snapshot(self) -> dict[str, int]:
        self.note("snapshot")
        return {
            "accounted": sum(source.accounted_bytes for source in self._sources.values()),
            "completion_accounted": sum(source.completion_accounted_bytes for source in self._sources.values()),
            **self.figures,
        }

    async def close(self) -> None:
        """Close every source, and end what still runs as `terminated`. A second time does nothing more."""
        self.note("close")
        self.closed = True
        for source in list(self._sources):
            self.close_source(source)
        for started in self.started:
            started.refuse("terminated")


def charge(item: Item) -> int:
    """Bytes that an item is accounted with, until it is taken."""
    return len(item.payload) + FRAME_COST_BYTES


def head_kind_of(item: Item | None) -> HeadKind:
    match item:
        case None:
            return HeadKind.NONE
        case Completion():
            return HeadKind.COMPLETION
        case Record():
            return HeadKind.ORDINARY
