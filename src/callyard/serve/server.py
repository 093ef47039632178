"""`Server`: worker, dispatcher and gateway as one, with one start, `reload` and one stop.

    server = Server(Path("functions.py"), config)
    async with server:
        status = await server.run(mcp_stdio.run)

The stop (D46), in this order and within one deadline: gates and gateway seal, what is under way ends or is stopped, the
gates send the last answers and close, executors end, stores and files close.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.exporters.audit import AuditExporter
from callyard.dispatch.policies import Policy
from callyard.dispatch.stores import open_key_store
from callyard.dispatch.stores.memory import MemoryKeyStore
from callyard.dispatch.stores.port import KeyStore
from callyard.errors import CallyardError
from callyard.functions.registry import FunctionSpec, Registry
from callyard.serve.bound import Bound, bind_address, close_bound
from callyard.serve.config import MEMORY, SQLITE, ServeConfig, gateway_of
from callyard.serve.gateway import Gateway
from callyard.serve.kept import KeptResults
from callyard.serve.keys import ServedKeys
from callyard.serve.state_folder import FolderKeyStore, StateFolder
from callyard.serve.tokens import Tokens
from callyard.worker.spawner import OutputCallback
from callyard.worker.worker import Worker, print_output

if TYPE_CHECKING:
    from callyard.serve.listener import Listener
    from callyard.serve.logs import Logs

WATCH_S: Final = 0.5
STOP_MS: Final = 1_500
"""After the drain deadline everything has so long to end; the process leaves 2 s after it, whatever still hangs."""
_LAST_ANSWERS_S: Final = 0.5
"""So long the gates have to send the answers of calls that were stopped."""
_log: Final = logging.getLogger("callyard.serve")

Gate = Callable[["Server"], Awaitable[None]]
"""Serves clients until the last one has gone, or `Server.stopping` is set and all that was under way is answered;
cancelled, it closes its connections at once."""
Say = Callable[[str], None]
"""Tells whoever started the server, in a line."""


class Server:
    """One target's functions behind gates. `async with` starts and stops it.

    `given` are settings of the worker, over those of file and environment.
    """

    def __init__(
        self,
        target: Path,
        config: ServeConfig | None = None,
        *,
        include: Iterable[str] = (),
        given: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        audit: object = None,
        audit_log: str | Path | None = None,
        policy: Policy | None = None,
        on_output: OutputCallback = print_output,
        say: Say = lambda line: None,
        complain: Say | None = None,
        read_config: Callable[[], ServeConfig] | None = None,
        next_folder: bool = False,
        watch: bool = False,
    ) -> None:
        """`read_config` reads the settings again, for `reload`. `next_folder`: where another server uses the default
        state folder, take the next one. `watch`: reload by itself when a file of the target has changed. Raises
        UsageError for settings and files that cannot be used."""
        self.config = config = config or ServeConfig()
        self.say = say
        self.complain = complain or say
        """Tells what went wrong, whatever is kept quiet."""
        environ = os.environ if environ is None else environ
        self.tokens = Tokens(config.tokens.values())
        registry = Registry.for_target(target, include=include)
        assert registry.target is not None
        self.worker = Worker(
            registry,
            config=config.worker_config(environ, **(given or {})),
            on_output=on_output,
            audit=audit,
            audit_log=audit_log,
            io=config.io,
        )
        self.target = registry.target
        self.stopping = asyncio.Event()
        """The stop has begun."""
        self.audit: AuditExporter | None = None
        """Of the audit file."""
        self.bound: dict[str, Bound] = {}
        """Where the gates will listen, from the start on."""
        self.listeners: dict[str, Listener] = {}
        """Those that are open, for the metrics."""
        self.logs: Logs | None = None
        """Where calls are logged, for the metrics; whoever opened it subscribes it."""
        self._policy = policy
        self._state_dir = config.folder_of(self.target.path, environ)
        self._next_folder = next_folder and config.state_dir is None
        self._read_config = read_config
        self._watch = watch
        self._stack = contextlib.AsyncExitStack()
        self._hurry = asyncio.Event()
        self._stop_at_s = 0.0
        self._reloading = asyncio.Lock()
        self._reload_wanted = asyncio.Event()
        self._gates: set[asyncio.Future[None]] = set()
        self._stopped: asyncio.Task[None] | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._hurry.set()
        await self.stop()

    async def start(self) -> None:
        """Raises UsageError when the target, a setting or a folder is wrong; nothing is left then."""
        stack = self._stack
        try:
            folder = self.folder = self._take_folder()
            stack.callback(folder.release)
            for name, address in (("http", self.config.http), ("admin", self.config.admin)):
                if address is not None:
                    self.bound[name] = bind_address(address.host, address.port)
                    stack.callback(close_bound, self.bound[name])
            if self.config.store == MEMORY:
                self.say("keys are kept in memory: after a restart nobody knows which calls have run")
            await self.worker.start()
            stack.push_async_callback(self._close_worker)
            await self.worker.preload()
            for spec in self.worker.registry:
                _ = spec.checker.schema  # compiled now: the first call of each does not wait for it
            store = FolderKeyStore(folder) if self.config.store == SQLITE else open_key_store(self.config.store)
            self.store: KeyStore = MemoryKeyStore() if store is None else store
            self.keys = ServedKeys(self.store, self.config.audit_file)
            dispatcher = self.dispatcher = Dispatcher(
                self.worker.registry,
                worker=self.worker,
                store=self.store,
                policy=self._policy,
                config=self.config.dispatcher(),
            )
            await dispatcher.__aenter__()
            stack.push_async_callback(dispatcher.close, drain_deadline_ms=0)
            if dispatcher.rates.shared is None and self._has_rates():
                self.say("rates are kept in this process: a second server of these functions counts for itself")
            self.gateway: Gateway = gateway_of(self.config, dispatcher)
            self.kept = KeptResults(
                folder.kept,
                max_result_bytes=self.config.max_result_bytes,
                kept_ms=self.config.kept_ms,
                bytes_max=self.config.kept_bytes_max,
            )
            await self.kept.open()
            stack.push_async_callback(self.kept.close)
            if self.config.audit_file is not None:
                audit = self.audit = AuditExporter(self.config.audit_file, required=self.config.audit_required)
                stack.push_async_callback(asyncio.to_thread, audit.close, 1.0)
                stack.callback(self.gateway.subscribe(audit))
                dispatcher.require(audit.admits)
        except BaseException:
            await self.worker.close(drain=False)
            await stack.aclose()
            raise

    def _has_rates(self) -> bool:
        declared = any(spec.promises.rate is not None for spec in self.worker.registry)
        return declared or any(token.caller.rate for token in self.config.tokens.values())

    def _take_folder(self) -> StateFolder:
        if not self._next_folder:
            return StateFolder.take(self._state_dir)
        folder = StateFolder.take_next(self._state_dir)
        if folder.path != self._state_dir:
            self.say(f"another server of this file runs: this one keeps its keys apart from it, in {folder.path}")
        return folder

    async def run(self, *gates: Gate) -> None:
        """Open the gates, and serve until `stop`, or until one of them has nobody left to serve. Raises what a gate
        raises, once everything is stopped."""
        self._gates = {asyncio.ensure_future(gate(self)) for gate in gates}
        stopping = asyncio.ensure_future(_wait_for(self.stopping))
        others = [asyncio.ensure_future(self._reload_when_asked())]
        if self._watch:
            others.append(asyncio.ensure_future(self._reload_on_change()))
        try:
            await asyncio.wait({stopping, *self._gates}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopping, *others):
                task.cancel()
            await self.stop()
        for gate in self._gates:
            if not gate.cancelled() and (error := gate.exception()) is not None:
                raise error

    def request_stop(self) -> None:
        """Begin the stop: what is under way may end until the drain deadline. A second time: now. Never waits."""
        if self.stopping.is_set():
            self._hurry.set()
        self._begin_stop()

    async def stop(self) -> None:
        """The whole stop. Idempotent: whoever asks waits for the same one."""
        self._begin_stop()
        assert self._stopped is not None
        await asyncio.shield(self._stopped)

    def _begin_stop(self) -> None:
        if self._stopped is None:
            self._stop_at_s = time.monotonic() + self.config.drain_deadline_ms / 1_000
            self.stopping.set()
            if hasattr(self, "gateway"):
                self.gateway.seal()
            self._stopped = asyncio.ensure_future(self._stop())

    async def _stop(self) -> None:
        if hasattr(self, "gateway"):
            calls = self.gateway.statistics().calls
            if calls and not self._hurry.is_set():
                left = f"{max(0.0, self._stop_at_s - time.monotonic()):.0f} s"
                count = "1 call has" if calls == 1 else f"{calls} calls have"
                self.say(f"stopping: {count} {left} to end; once more stops them now")
            await self._drain()
            await self._close_gates()
            self.gateway.abort()
        try:
            async with asyncio.timeout(max(0.1, self._stop_at_s + STOP_MS / 1_000 - time.monotonic())):
                await self._stack.aclose()
        except TimeoutError:
            _log.error("the server did not close everything in time: it leaves what hangs")

    async def _drain(self) -> None:
        left_ms = 0 if self._hurry.is_set() else max(0, round((self._stop_at_s - time.monotonic()) * 1_000))
        draining = asyncio.ensure_future(self.dispatcher.close(drain_deadline_ms=left_ms))
        hurried = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
            if not draining.done():
                await self.dispatcher.close(drain_deadline_ms=0)
            await draining
        finally:
            hurried.cancel()

    async def _close_gates(self) -> None:
        """They send the last answers, and are cancelled then."""
        if self._gates:
            await asyncio.wait(self._gates, timeout=_LAST_ANSWERS_S)
        for gate in self._gates:
            gate.cancel()
        if self._gates:
            await asyncio.wait(self._gates, timeout=_LAST_ANSWERS_S)

    async def _close_worker(self) -> None:
        await self.worker.close(drain=False)

    # --- new code -------------------------------------------------------------------------------------------------

    def request_reload(self) -> None:
        """Reload soon. Never waits."""
        self._reload_wanted.set()

    async def reload(self) -> bool:
        """Read the functions' files and the tokens again. What runs goes on with what it began with. False: nothing
        has changed, or the new does not work: the old goes on, and what is wrong is told."""
        async with self._reloading:
            tokens_changed = self._reload_tokens()
            before = _index(self.worker.registry)
            try:
                changed = await self.worker.reload()
            except (CallyardError, OSError) as error:
                self.complain(f"reload failed, the old version goes on: {error}")
                return tokens_changed
            if changed:
                self.say(_show_change(before, _index(self.worker.registry)))
                self.gateway.tell_changed()
            return changed or tokens_changed

    def _reload_tokens(self) -> bool:
        if self._read_config is None:
            return False
        try:
            fresh = self._read_config()
            if fresh.tokens == self.config.tokens:
                return False
            self.config = self.config.with_settings(tokens=fresh.tokens)
        except (CallyardError, OSError) as error:
            self.complain(f"the settings stay as they are: {error}")
            return False
        self.tokens.replace(fresh.tokens.values())
        if fresh.tokens:
            self.say(f"{len(fresh.tokens)} tokens are let in now")
        else:
            self.say("there is no token any more: nobody is let in until there is one, or until a new start")
        return True

    async def _reload_when_asked(self) -> None:
        while True:
            await self._reload_wanted.wait()
            self._reload_wanted.clear()
            await self.reload()

    async def _reload_on_change(self) -> None:
        """A file that does not load is told of once, and tried again when it has changed again."""
        seen: dict[str, tuple[int, int]] = {}  # the first look reads them all: they may have changed since the start
        while True:
            await asyncio.sleep(WATCH_S)
            now = await asyncio.to_thread(self._look)
            if now != seen:
                seen = now
                await self.reload()

    def _look(self) -> dict[str, tuple[int, int]]:
        """Times and sizes of the bundle's files."""
        registry = self.worker.registry
        assert registry.target is not None
        root = registry.target.root
        found: dict[str, tuple[int, int]] = {}
        for name in registry.bundle.files:
            with contextlib.suppress(OSError):
                state = (root / name).stat()
                found[name] = (state.st_mtime_ns, state.st_size)
        return found


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


def _index(registry: Registry) -> dict[str, FunctionSpec]:
    return {spec.name: spec for spec in registry}


def _show_change(before: Mapping[str, FunctionSpec], after: Mapping[str, FunctionSpec]) -> str:
    new, gone = [name for name in after if name not in before], [name for name in before if name not in after]
    notes = [f"new: {', '.join(new)}"] if new else []
    notes += [f"gone: {', '.join(gone)}"] if gone else []
    return f"reloaded: {len(after)} functions" + (f" ({'; '.join(notes)})" if notes else "")
