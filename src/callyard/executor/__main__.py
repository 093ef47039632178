"""`python -m callyard.executor`: reads its arguments, connects, and hands over to the hub (X51)."""

from __future__ import annotations

import _socket
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Final, NoReturn

from callyard import sdk
from callyard.errors import ProtocolError, UsageError
from callyard.executor.arena import Arena
from callyard.executor.guards import Guards, keep_streams_open
from callyard.executor.heartbeat import Watch
from callyard.executor.hub import Hub
from callyard.executor.lifeline import Lifeline, end_group, flush_streams, peer_is_parent, tie_group_to
from callyard.executor.link import Link, LinkClosed, open_socket
from callyard.executor.marks import MarkPage, Marks
from callyard.executor.options import (
    EXIT_PROTOCOL,
    EXIT_SOFTWARE,
    EXIT_USAGE,
    EXIT_VERSION,
    Options,
    VersionMismatch,
    parse_options,
)
from callyard.executor.runtime import ExecutorRuntime
from callyard.executor.shared import SharedValues

TOKEN_VARIABLE: Final = "CALLYARD_LINK_TOKEN"


def main(argv: list[str], wait_joined: Callable[[], None] | None = None) -> NoReturn:
    """`wait_joined`: this process is on its way into its control groups; see `launch`."""
    token = os.environ.pop(TOKEN_VARIABLE, "")
    try:
        options = parse_options(argv)
        sock = open_socket(options.socket_fd, options.socket_path)
        marks = MarkPage(options.mark_fd) if options.mark_fd >= 0 else Marks()
        arena = Arena(options.arena_fd) if options.arena_fd >= 0 else None
        shared = SharedValues(options.shared_fd) if options.shared_fd >= 0 else None
        if options.nice:
            os.nice(options.nice)
        if options.confine:
            confine(options, wait_joined)
    except VersionMismatch as error:
        leave(str(error), EXIT_VERSION)
    except (UsageError, OSError) as error:
        leave(str(error), EXIT_USAGE)
    try:
        serve(options, sock, marks, arena, shared, token)
    except LinkClosed as lost:
        end(lost)
    except ProtocolError as error:
        leave(f"the worker broke the protocol: {error}", EXIT_PROTOCOL)
    except BaseException:  # noqa: BLE001 - a bug of ours: tell it, and let no atexit hook of user code run
        sys.excepthook(*sys.exc_info())
        leave("a bug of callyard's: see the traceback above", EXIT_SOFTWARE)


def confine(options: Options, wait_joined: Callable[[], None] | None) -> None:
    """Before hello: who hears it knows that this process is confined. Raises `UsageError` when it cannot be."""
    from callyard.executor.confine import apply, parse_confinement

    if options.lifeline_fd >= 0:
        tie_group_to(options.lifeline_fd)  # later it would be refused
    apply(parse_confinement(options.confine), wait_joined)


def serve(
    options: Options, sock: _socket.socket, marks: Marks, arena: Arena | None, shared: SharedValues | None, token: str
) -> NoReturn:
    """Say hello first, arrange the rest after: what follows costs the worker no waiting."""
    parent_pid = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's to handle
    guards = Guards()
    link = Link(sock, marks, arena, shared)
    hub = Hub(link, marks, guards, max_inflight=options.max_inflight, with_locals=options.capture_locals)
    hub.watch = watch = Watch(hub, link, options.executor_id, options.heartbeat_interval_ms, end)
    watch.beat(token)
    watch.start()
    is_tied = options.lifeline_fd >= 0 and (bool(options.confine) or tie_group_to(options.lifeline_fd))
    lifeline = Lifeline()
    if options.socket_fd >= 0 or peer_is_parent(sock):
        if is_tied:
            lifeline.end_group_with(parent_pid)
        else:
            lifeline.tie_to(parent_pid)
    streams = keep_streams_open()
    hub.streams = [*streams]
    hub.teller.watch_streams(streams)
    guards.install(link.fd)
    guards.keep_open({memory.fd for memory in (arena, shared) if memory is not None})
    own_pid = os.getpid()

    def in_child(forked_by_main_thread: bool) -> None:
        hub.forked()
        if forked_by_main_thread:  # else the signal would follow a thread that may end before its process
            lifeline.tie_to(own_pid)

    guards.guard_forks(in_child)
    sdk.set_runtime(ExecutorRuntime(hub))
    warm_up()
    hub.run()
    raise AssertionError("the hub serves until its link ends")


def warm_up() -> None:
    """Import what every bundle needs, pydantic above all, before one is asked for: a spare that takes a lost one's
    place then has only the bundle itself to load."""
    try:
        importlib.import_module("callyard.functions.signature")
    except ImportError:  # an interpreter that lacks something: the first load says so, to whoever wants it
        return


def end(lost: LinkClosed) -> NoReturn:
    """No worker, so no calls: end at once, in whatever state they are (X63)."""
    if lost.clean:
        end_group(0)
    sys.stderr.write(f"callyard.executor: {lost}\n")
    end_group(EXIT_PROTOCOL)


def leave(message: str, status: int) -> NoReturn:
    sys.stderr.write(f"callyard.executor: {message}\n")
    flush_streams()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
