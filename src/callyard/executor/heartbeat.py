"""The watch thread: heartbeats, and the eyes of a hub that is inside user code.

A heartbeat every 500 ms whatever the hub does (X55). Between them, while the hub is busy, a look every 20 ms: when the
hub has been inside one slice since the last look, the thread sends results that were collected before it, ends the
process when the worker is gone (X63), and signals the main thread when a cancellation is to be read (X54). An idle hub
is not looked after: the thread parks until the next heartbeat or until the hub, on its way into user code, wakes it.
"""

from __future__ import annotations

import _thread
import os
import resource
import signal
import sys
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

from callyard import __version__
from callyard.executor.link import Link, LinkClosed
from callyard.ids import CallId, ExecutorId
from callyard.wire.codec import encode_message
from callyard.wire.messages import PROTOCOL_VERSION, Heartbeat, HeartbeatPayload

if TYPE_CHECKING:
    from collections.abc import Callable

    from callyard.executor.hub import Hub

_close: Final = os.close
"""The real one: `guards` is for user code."""
LOOK_NS: Final = 20_000_000
IDLE_LOOKS_MAX: Final = 5
"""Looks at an idle hub before the thread parks."""


class Watch:
    def __init__(
        self,
        hub: Hub,
        link: Link,
        executor_id: ExecutorId,
        interval_ms: int,
        on_lost: Callable[[LinkClosed], None],
    ) -> None:
        """`on_lost` ends the process; it is called in the watch thread."""
        self.parked = False
        """The thread sleeps until the next heartbeat: `unpark` before going into user code."""
        self._hub = hub
        self._link = link
        self._executor_id = executor_id
        self._interval_ns = interval_ms * 1_000_000
        self._on_lost = on_lost
        self._seq = 0
        self._main_thread = _thread.get_ident()
        self._wake = _thread.allocate_lock()
        self._wake.acquire()
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def start(self) -> None:
        """A bare thread: `threading` is not imported for it, and user code does not see it there."""
        _thread.start_new_thread(self._run, ())

    def unpark(self) -> None:
        self.parked = False
        try:
            self._wake.release()
        except RuntimeError:  # it is awake already
            return

    # --- heartbeats -----------------------------------------------------------------------------------------------

    def beat(self, token: str = "") -> None:
        """Send a heartbeat now, from any thread. The first one says who is speaking (X51)."""
        with self._link.lock:
            self._seq += 1
            self._link.send_locked(encode_message(Heartbeat(self._payload(token))))

    def _payload(self, token: str) -> HeartbeatPayload:
        hub, first = self._hub, self._seq == 1
        times = os.times()
        return HeartbeatPayload(
            executor_id=self._executor_id,
            heartbeat_seq=self._seq,
            runnable_count=hub.runnable_count,
            inflight_count=hub.inflight_count,
            available_contexts=hub.available_contexts,
            memory_bytes=self._resident_bytes(),
            last_scheduler_active_at_ms=hub.active_ns // 1_000_000,
            running_call_id=hub.running_call_id or CallId(""),
            cpu_user_ms=int(times.user * 1000),
            cpu_system_ms=int(times.system * 1000),
            draining=hub.draining,
            callyard_version=__version__ if first else "",
            protocol=PROTOCOL_VERSION if first else 0,
            python_version=".".join(map(str, sys.version_info[:3])) if first else "",
            token=token,
        )

    def _resident_bytes(self) -> int:
        try:
            fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # The peak, where the present size cannot be read: kilobytes, on macOS bytes.
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        try:
            return int(os.read(fd, 128).split()[1]) * self._page_bytes
        finally:
            _close(fd)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Signals are the main thread's: one that lands here would not wake it from a system call.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            try:
                self._watch()
            except LinkClosed as lost:
                self._on_lost(lost)
            except MemoryError:  # a call's doing; it has ended or will
                continue

    def _watch(self) -> None:
        hub = self._hub
        next_beat_ns = monotonic_ns() + self._interval_ns
        seen_slice, idle_looks = -1, 0
        while True:
            now = monotonic_ns()
            if now >= next_beat_ns:
                next_beat_ns = now + self._interval_ns
                self._check_gone()
                self.beat()
            if self._sleep(next_beat_ns - now, may_park=idle_looks >= IDLE_LOOKS_MAX):
                idle_looks = 0
            if not hub.busy:
                idle_looks += 1
                continue
            idle_looks = 0
            if hub.slice_number == seen_slice:
                self._look()
            seen_slice = hub.slice_number

    def _sleep(self, until_beat_ns: int, *, may_park: bool) -> bool:
        """True: the hub woke us."""
        if may_park:
            # First say so, then look again: the hub first says that it is busy, then looks whether we are parked.
            self.parked = True
            if self._hub.busy:
                self.parked = False
        wait_ns = until_beat_ns if self.parked else min(until_beat_ns, LOOK_NS)
        woken = self._wake.acquire(timeout=max(wait_ns, 1_000_000) / 1e9)
        self.parked = False
        return woken

    def _look(self) -> None:
        """The hub is where it was 20 ms ago: inside user code."""
        self._check_gone()
        self._link.flush_late()
        now = monotonic_ns()
        if self._hub.teller.due_ns <= now:
            self._hub.teller.send_due(now)
        if self._link.has_cancel() and not self._hub.alarm_is_taken:
            self._hub.alarm.look_wanted = True
            signal.pthread_kill(self._main_thread, signal.SIGALRM)

    def _check_gone(self) -> None:
        if self._link.is_gone():
            raise LinkClosed("the worker closed the link", clean=True)
