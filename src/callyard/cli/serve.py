"""`callyard serve`: a target's functions behind MCP and HTTP, until a signal or its client ends it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from callyard.cli.init import divide_as_init
from callyard.cli.interrupts import Interrupts, exit_status
from callyard.cli.screen import Screen
from callyard.cli.setup import SET, Setup, read_io
from callyard.cli.start import run_command
from callyard.errors import UsageError
from callyard.extras import needs
from callyard.functions.target import split_target
from callyard.serve.logs import Logs, choose_format
from callyard.settings import Given
from callyard.worker.sandbox.report import summarize

if TYPE_CHECKING:
    from callyard.serve.config import Address, ServeConfig
    from callyard.serve.server import Gate, Server

LEAVE_AFTER_S: Final = 1.8
"""After the drain deadline: what hangs then is left behind (D46 allows 2 s)."""
YOUNG_OBJECTS: Final = 5_000
"""More than some 20 requests hold, and less than what anybody's memory would be short of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    target: str
    settings: Mapping[str, Any]
    """Of `ServeConfig`, over those of the file."""
    config: Path | None
    """The settings file."""
    reload: bool
    setup: Setup
    note: str = ""
    """What is said of that file."""
    log_format: str | None = None
    """json or text; None: text on a terminal."""
    log_level: str = "info"

    def read(self) -> ServeConfig:
        """File, then options. Raises UsageError."""
        from callyard.serve.config import ServeConfig

        if self.config is None:
            config = ServeConfig().with_settings(**self.settings)
        else:
            config = ServeConfig.read(self.config, self.settings)
        return config if self.setup.io is None else config.with_settings(io=read_io(self.setup.io))


OPTIONS: Final[Mapping[str, str]] = {
    "http": "--http",
    "admin": "--admin",
    "tls_cert": "--tls-cert",
    "tls_key": "--tls-key",
    "drain_deadline_ms": "--drain",
    "deadline_ms": "--deadline",
    "state_dir": "--state-dir",
    "store": "--store",
    "audit_file": "--calls-log",
}
"""Settings of the server that have an option of their own."""


def read_settings(sets: Sequence[str], **given: Any) -> dict[str, Given]:
    """Of `ServeConfig`, those that were given: by an option, or in `sets` by `NAME=VALUE`. Raises UsageError."""
    from callyard.serve.config import HTTP_PORT, MEMORY, SQLITE, Address, read_serve_pairs

    settings = {name: Given(value, OPTIONS[name]) for name, value in given.items() if value is not None}
    http, admin = given["http"], given["admin"]
    if http is not None:
        if http.isdecimal():  # else it were a host of that name
            raise UsageError(f"expected an address such as 127.0.0.1:{http}, got {http!r}: --http HOST:PORT")
        settings["http"] = Given(Address.parse(http, port=HTTP_PORT), OPTIONS["http"])
    if admin is not None:
        settings["admin"] = Given(Address.parse(admin), OPTIONS["admin"])
    store = given["store"]
    if store is not None and store not in (SQLITE, MEMORY) and "://" not in store:
        settings["store"] = Given(os.path.abspath(store), OPTIONS["store"])
    for name, pair in read_serve_pairs(sets, SET).items():
        if name in settings:
            raise UsageError(f"{pair.origin} and {settings[name].origin} are the same setting: keep one")
        settings[name] = pair
    return settings


def serve_target(options: ServeOptions, screen: Screen) -> int:
    """Serve until it is stopped; the exit status. Raises UsageError when the command itself was wrong."""
    path, function = split_target(options.target)
    if function is not None:
        raise UsageError(f"serve takes all of {path}: which of its functions a caller sees is up to its token")
    config = options.read()
    divide_as_init()
    level = "error" if options.setup.quiet else options.log_level
    logs = Logs(choose_format(options.log_format, is_terminal=screen.is_terminal), level)
    logs.open()
    try:
        shown = LoggedScreen(logs) if logs.form == "json" else screen
        if options.note and not options.setup.quiet:
            shown.say(options.note, style="dim")
        gates = load_gates(config, shown, quiet=options.setup.quiet)
        return run_command(lambda interrupts: _serve(path, config, gates, options, shown, logs, interrupts), shown)
    finally:
        logs.close()


class LoggedScreen(Screen):
    """What is said goes to the log: whoever reads JSON reads nothing else."""

    def __init__(self, logs: Logs) -> None:
        super().__init__()
        self._logs = logs

    def say(self, text: str, style: str | None = None) -> None:
        self._logs.say(text, logging.ERROR if style == "red" else logging.INFO)


async def _serve(
    path: Path,
    config: ServeConfig,
    gates: list[Gate],
    options: ServeOptions,
    screen: Screen,
    logs: Logs,
    interrupts: Interrupts,
) -> int:
    from callyard.serve.server import Server

    quiet = options.setup.quiet
    server = Server(
        path,
        config,
        include=options.setup.include,
        given={name: one.value for name, one in options.setup.given.items()},
        audit=options.setup.audit,
        audit_log=options.setup.audit_log,
        on_output=logs.say_output,
        say=lambda line: None if quiet else screen.say(line, style="dim"),
        complain=lambda line: screen.say(line, style="red"),
        read_config=options.read if options.config is not None else None,
        next_folder=config.http is None,
        watch=options.reload,
    )
    async with server:
        server.logs = logs
        server.gateway.subscribe(logs)
        _settle_memory()
        if not quiet:
            _say_ready(server, screen)
        signals = _Signals(server, interrupts, screen)
        interrupts.handler = signals.on_interrupt
        signals.install()
        await server.run(*gates)
    return exit_status(interrupts.number) if interrupts.number else 0


def _settle_memory() -> None:
    """What is loaded stays: no collection has to walk it while calls wait. And what a burst of requests holds for a
    moment is no garbage to look for: by Python's own threshold every third request would begin a search."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)


def _say_ready(server: Server, screen: Screen) -> None:
    count, executors = len(server.gateway.registry), len(server.worker.slots())
    functions = "1 function" if count == 1 else f"{count} functions"
    processes = "1 executor" if executors == 1 else f"{executors} executors"
    screen.say(f"{server.target.name}: {functions} on {processes}, {summarize(server.worker.sandbox)}", style="dim")
    if server.config.http is None:
        on_terminal = "; a client is expected on stdin, not a person: add --http for a port" if os.isatty(0) else ""
        screen.say(f"MCP on stdio{on_terminal}", style="dim")


class _Signals:
    """Of a running server. The first SIGTERM or Ctrl-C drains, the second stops at once, the next one leaves. SIGHUP
    reloads, unless it says that the terminal is gone.

    From the first one on a thread of its own keeps the deadline, which holds also while the loop does not turn.
    """

    def __init__(self, server: Server, interrupts: Interrupts, screen: Screen) -> None:
        self._server = server
        self._interrupts = interrupts
        self._screen = screen
        self._had_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._timer: threading.Timer | None = None
        self._loop = asyncio.get_running_loop()

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            installed = signal.getsignal(number)
            if callable(installed):
                signal.signal(number, partial(self._catch, installed))
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, partial(self._catch_hangup, signal.getsignal(signal.SIGHUP)))

    def on_interrupt(self, count: int) -> None:
        if count > 2:
            self._interrupts.leave()
        if count == 2:
            self._server.say("stopping now")
        self._server.request_stop()

    def _catch(self, installed: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
        if self._timer is None:
            seconds = self._server.config.drain_deadline_ms / 1_000 + LEAVE_AFTER_S
            self._timer = threading.Timer(seconds, self._leave, (number,))
            self._timer.daemon = True
            self._timer.start()
        installed(number, frame)

    def _leave(self, number: int) -> None:
        os.write(2, b"the drain deadline is over, and something still hangs: leaving it\n")
        os._exit(exit_status(number))

    def _catch_hangup(self, installed: Any, number: int, frame: FrameType | None) -> None:
        if self._had_terminal and not os.isatty(2):
            self._catch(installed, number, frame)
        else:
            self._loop.call_soon_threadsafe(self._server.request_reload)


# --- gates --------------------------------------------------------------------------------------------------------


def load_gates(config: ServeConfig, screen: Screen, *, quiet: bool) -> list[Gate]:
    """Raises UsageError where what they stand on is not installed."""
    with needs("serve", "callyard serve"):
        gates = [_load_http(config) if config.http is not None else _load_stdio()]
        if config.admin is not None:
            gates.append(_load_admin(config.admin, screen, quiet=quiet))
    return gates


def _load_stdio() -> Gate:
    from callyard.serve import mcp_stdio

    return mcp_stdio.run


def _load_http(config: ServeConfig) -> Gate:
    from callyard.serve.http_app import serve_http

    return partial(serve_http, tls_cert=config.tls_cert, tls_key=config.tls_key)


def _load_admin(address: Address, screen: Screen, *, quiet: bool) -> Gate:
    from callyard.serve.admin import serve

    def say(bound: Address) -> None:
        if quiet:
            return
        screen.say(f"health and metrics at http://{bound}/livez, /readyz, /metrics", style="dim")
        if not bound.is_loopback:
            screen.say("other machines can read them there; no function can be called by it", style="dim")

    return lambda server: serve(server, address, say)
