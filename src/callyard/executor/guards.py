"""What user code may do to its process, noted and put back; and what it may not take away (X57).

Each guard is a wrapper around one function of the standard library, so that a call that changes nothing pays nothing.
(An audit hook would be more thorough by a hair, and costs every `id()` and `open()` in the process: copy.deepcopy takes
1.9 times as long under one.) A wrapper notes a change the first time it happens, with what undoes it; the hub puts
everything back when the running code next leaves its greenlet, before anyone else runs.

Changes made while the bundle is loaded are part of the bundle and stay.
"""

from __future__ import annotations

import _locale
import _thread
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn, TextIO

LEFT_OPEN: Final = (0, 1, 2)
"""Standard descriptors: closed, the next file opened would take their place, and every print would land in it."""


class Guards:
    def __init__(self) -> None:
        self.changed = False
        """The slow path is wanted when the running code leaves its greenlet."""
        self.in_child = False
        """This process is a fork that user code made."""
        self.loading = False
        self.alarm_touched = False
        """User code changed SIGALRM or its timer."""
        self.release_timer: Callable[[], object] = lambda: None
        """Disarms the executor's timer: user code has taken the handler, and may have left none."""
        self.close: Final = os.close
        """The real one."""
        self._undo: dict[object, tuple[str, Callable[[], bool]]] = {}
        self._notes: list[str] = []
        self._putting_back = False
        self._kept_fds: set[int] = set(LEFT_OPEN)

    def install(self, link_fd: int) -> None:
        self._kept_fds.add(link_fd)
        self._guard_descriptors()
        self._guard_folder()
        self._guard_environment()
        self._guard_umask()
        self._guard_signals()
        self._guard_locale()

    def keep_open(self, fds: set[int]) -> None:
        """User code may not close these either."""
        self._kept_fds |= fds

    def put_back(self) -> list[str]:
        """Undo what was changed, and tell it. The hub only."""
        notes, self._notes = self._notes, []
        undo, self._undo = self._undo, {}
        self.changed = False
        self._putting_back = True
        try:
            for text, restore in reversed(undo.values()):
                try:
                    if restore():
                        notes.append(f"{text}: put back")
                except (OSError, ValueError, TypeError) as error:
                    notes.append(f"{text}: could not be put back: {error}")
        finally:
            self._putting_back = False
        return notes

    def note(self, text: str) -> None:
        """Something to tell the running call."""
        if not self.loading:
            self._notes.append(text)
            self.changed = True

    def _changing(self, key: object, text: str, restore: Callable[[], bool]) -> None:
        """`key` is about to change; the first time counts.

        `restore` leads back; False: there was nothing to lead back, user code has done so itself.
        """
        if self.loading or self._putting_back or key in self._undo:
            return
        self._undo[key] = (text, restore)
        self.changed = True

    # --- noted and put back ---------------------------------------------------------------------------------------

    def _guard_folder(self) -> None:
        for name in ("chdir", "fchdir"):
            self._wrap_folder(name)

    def _wrap_folder(self, name: str) -> None:
        real: Callable[[Any], None] = getattr(os, name)

        def change(path: Any) -> None:
            before = _current_folder()
            real(path)
            self._changing(
                "cwd", f"changed the working directory to {_current_folder()!r}", lambda: _restore_folder(before)
            )

        _replace(os, name, change)
        if real in os.supports_fd:
            os.supports_fd.add(change)

    def _guard_environment(self) -> None:
        real_put, real_unset = os.putenv, os.unsetenv

        def putenv(name: Any, value: Any) -> None:
            self._changing_variable(name)
            real_put(name, value)

        def unsetenv(name: Any) -> None:
            self._changing_variable(name)
            real_unset(name)

        # os.environ calls these two by their names in `os`, before it changes its own table.
        _replace(os, "putenv", putenv)
        _replace(os, "unsetenv", unsetenv)

    def _changing_variable(self, name: Any) -> None:
        if self.loading or self._putting_back:
            return
        key = os.fsdecode(name)
        before = os.environ.get(key)

        def restore() -> bool:
            if before is not None:
                os.environ[key] = before
            else:
                os.environ.pop(key, None)
                os.unsetenv(key)
            return True  # os.environ does not know what os.putenv did

        self._changing(("environ", key), f"changed the environment variable {key}", restore)

    def _guard_umask(self) -> None:
        real = os.umask

        def umask(mask: int) -> int:
            before = real(mask)
            if mask != before:
                self._changing("umask", f"changed the umask to {mask:#o}", lambda: real(before) != before)
            return before

        _replace(os, "umask", umask)

    def _guard_signals(self) -> None:
        real = signal.signal

        def set_handler(signalnum: int, handler: Any) -> Any:
            before = real(signalnum, handler)
            if signalnum == signal.SIGALRM:
                if not self.alarm_touched:
                    self.release_timer()
                self._touch_alarm("changed the handler of SIGALRM")
            elif before is not None and before is not handler:
                name = signal.Signals(signalnum).name
                self._changing(
                    ("signal", signalnum),
                    f"changed the handler of {name}",
                    lambda: real(signalnum, before) is not before,
                )
            return before

        _replace(signal, "signal", set_handler)
        for name in ("setitimer", "alarm"):
            self._wrap_timer(name)
        self._guard_signal_mask()

    def _guard_signal_mask(self) -> None:
        """A blocked SIGALRM would leave every later call without its budget. Other threads' masks are their own."""
        real = signal.pthread_sigmask
        main_thread = _thread.get_ident()

        def set_mask(how: Any, mask: Any) -> Any:
            before = real(how, mask)
            if _thread.get_ident() == main_thread and real(signal.SIG_BLOCK, ()) != before:
                self._changing(
                    "signal mask",
                    "changed the signal mask",
                    lambda: real(signal.SIG_SETMASK, before) != before,
                )
            return before

        _replace(signal, "pthread_sigmask", set_mask)

    def _wrap_timer(self, name: str) -> None:
        real: Callable[..., Any] = getattr(signal, name)

        def set_timer(*args: Any) -> Any:
            if name == "alarm" or (args and args[0] == signal.ITIMER_REAL):
                self._touch_alarm(f"used signal.{name}, which the executor's own timer needs")
            return real(*args)

        _replace(signal, name, set_timer)

    def _touch_alarm(self, text: str) -> None:
        if not self.loading:
            self.alarm_touched = True
            self._changing("alarm", text, lambda: True)  # the hub takes it back

    def _guard_locale(self) -> None:
        # locale.setlocale goes through this one, whether `locale` is imported before or after.
        real = _locale.setlocale

        def setlocale(category: int, locale: str | None = None, /) -> str:
            if locale is None:
                return real(category)
            before = real(category)
            after = real(category, locale)
            self._changing(
                ("locale", category),
                f"changed the locale to {after!r}",
                lambda: _restore_locale(real, category, before),
            )
            return after

        _replace(_locale, "setlocale", setlocale)
        loaded = sys.modules.get("locale")
        if loaded is not None:
            _replace(loaded, "_setlocale", setlocale)

    # --- refused --------------------------------------------------------------------------------------------------

    def _guard_descriptors(self) -> None:
        real_close, real_range, real_dup2 = os.close, os.closerange, os.dup2
        kept = self._kept_fds

        def close(fd: Any) -> None:
            if fd in kept:
                raise _refusal(fd)
            real_close(fd)

        def closerange(fd_low: int, fd_high: int, /) -> None:
            low = fd_low
            for fd in [*sorted(fd for fd in kept if fd_low <= fd < fd_high), fd_high]:
                if low < fd:  # an empty range that starts at 0 would close everything
                    real_range(low, fd)
                low = fd + 1

        def dup2(fd: int, fd2: int, inheritable: bool = True) -> int:
            # Onto a standard descriptor is how C output is caught, and leaves one open.
            if fd2 in kept and fd2 not in LEFT_OPEN:
                raise _refusal(fd2)
            return real_dup2(fd, fd2, inheritable)

        _replace(os, "close", close)
        _replace(os, "closerange", closerange)
        _replace(os, "dup2", dup2)

    # --- forks ----------------------------------------------------------------------------------------------------

    def guard_forks(self, in_child: Callable[[bool], None]) -> None:
        """Call `in_child(forked_by_the_main_thread)` first thing in every child that os.fork makes."""
        main_thread = _thread.get_ident()
        by_main = True

        def before() -> None:
            nonlocal by_main
            by_main = _thread.get_ident() == main_thread

        def after() -> None:
            self.in_child = self.changed = True
            self._kept_fds.clear()
            in_child(by_main)

        os.register_at_fork(before=before, after_in_child=after)


def _restore_folder(before: str) -> bool:
    if _current_folder() == before:
        return False
    os.chdir(before)
    return True


def _restore_locale(real: Callable[..., str], category: int, before: str) -> bool:
    try:
        if real(category) == before:
            return False
        real(category, before)
        return True
    except Exception as error:  # locale.Error, whose module is not worth importing
        raise OSError(str(error)) from error


def _refusal(fd: int) -> OSError:
    return OSError(errno.EBADF, f"descriptor {fd} belongs to the executor and stays open")


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "(a folder that is gone)"


def _replace(module: Any, name: str, wrapper: Callable[..., Any]) -> None:
    real = getattr(module, name)
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(wrapper, attribute, getattr(real, attribute, None))
    setattr(module, name, wrapper)


class KeptOpen(io.TextIOWrapper):
    """A standard stream that user code cannot close for its neighbours."""

    on_write: Callable[[str], None] | None = None
    """Told what is written."""

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.on_write is not None:
            self.on_write(text)
        return count

    def close(self) -> None:
        self.flush()

    def detach(self) -> NoReturn:
        raise io.UnsupportedOperation("a standard stream of the executor keeps its buffer")


class KeptOpenBuffer(io.BufferedWriter):
    """The same for its buffer."""

    def close(self) -> None:
        self.flush()

    def detach(self) -> NoReturn:
        raise io.UnsupportedOperation("a standard stream of the executor keeps its descriptor")


def keep_streams_open() -> list[KeptOpen]:
    """Make stdout and stderr line buffered and proof against `close()`. Protocol bytes never go there."""
    kept: list[KeptOpen] = []
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old: TextIO | None = getattr(sys, name)
        if old is None:  # started with the descriptor closed
            continue
        raw = KeptOpenBuffer(io.FileIO(fd, "w", closefd=False))
        stream = KeptOpen(raw, encoding=old.encoding, errors=old.errors, line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
        kept.append(stream)
    return kept


def open_descriptors() -> set[int]:
    """Every descriptor of this process."""
    found = set()
    for name in os.listdir("/dev/fd"):
        try:
            os.fstat(int(name))
        except OSError:  # the one that the listing itself had open
            continue
        found.add(int(name))
    return found
