"""What user code may do to its process, noted and put back; and what it may not take away (X57).

Each guard is a wrapper around one function of the standard library, so that a call that changes nothing pays nothing.
(An audit hook would be more thorough by a hair, and costs every `id()` and `open()` in the process: copy.deepcopy takes
1.9 times as long under one.) A wrapper notes a change the first time it happens, with what was there before; the hub
puts everything back when the running code next leaves its greenlet, before anyone else runs.

An exclusive call has no neighbours, so its changes stay over its waits, and only its end puts them back. Its subcalls
may run here meanwhile: they find what the bundle left, and it finds its own again.

Changes made while the bundle is loaded are part of the bundle and stay.
"""

from __future__ import annotations

import _locale
import _thread
import errno
import io
import operator
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn, TextIO

LEFT_OPEN: Final = (0, 1, 2)
"""Standard descriptors: closed, the next file opened would take their place, and every print would land in it."""


class Change:
    """Something that running code has changed."""

    __slots__ = ("_differs", "after", "before", "read", "text", "write")

    def __init__(
        self,
        text: str,
        before: Any,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        differs: Callable[[Any, Any], bool] = operator.ne,
    ) -> None:
        """`read` says what is there now, `write` puts something there; both may raise `OSError` and `ValueError`."""
        self.text = text
        self.before = before
        self.read = read
        self.write = write
        self.after: Any = None
        """What it had come to, once it was set aside."""
        self._differs = differs

    def put_back(self) -> bool:
        """False: there was nothing to put back, user code has done so itself."""
        self.after = self.read()
        if not self.differs(self.after):
            return False
        self.write(self.before)
        return True

    def differs(self, value: object) -> bool:
        return self._differs(value, self.before)


Changes = dict[object, Change]
"""By what was changed, in the order of the first changes."""


def _set_aside(change: Change) -> bool:
    change.put_back()
    return False  # not worth a note: it comes again


def _set_again(change: Change) -> bool:
    change.write(change.after)
    return False


NEVER_KEPT: Final = ("alarm", "signal mask")
"""What the executor itself needs to stop a call that waits."""


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
        self.kept: Final[dict[object, Changes]] = {}
        """The changes of exclusive calls that wait, by call."""
        self._worn_by: object = None
        """Whose of them are in force."""
        self._changes: Changes = {}
        """Those of the running code."""
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

    def put_back(self, keeper: object = None) -> list[str]:
        """Undo what was changed, and tell it. The hub only. `keeper`: an exclusive call, which keeps it to its end."""
        notes, self._notes = self._notes, []
        changes, self._changes = self._changes, {}
        self.changed = False
        if keeper is not None:
            kept = {key: change for key, change in changes.items() if key not in NEVER_KEPT}
            if kept:
                self.kept[keeper] = kept
                self._worn_by = keeper
            changes = {key: changes[key] for key in NEVER_KEPT if key in changes}
        return notes + self._undo(changes)

    def wear(self, call: object) -> list[str]:
        """`call` is about to run: whatever another one keeps is set aside, and what it keeps itself is there again.

        The hub only, and only while something is `kept`.
        """
        notes: list[str] = []
        if self._worn_by is not call:
            notes += self._each(reversed(self.kept.get(self._worn_by, {}).values()), _set_aside, "put back")
            notes += self._each(self.kept.get(call, {}).values(), _set_again, "set again")
        self._worn_by = None
        mine = self.kept.pop(call, None)
        if mine is not None:
            self._changes = mine
            self.changed = True
        return notes

    def give_up(self, call: object) -> list[str]:
        """`call` has ended: nothing is kept for it any more. The hub only."""
        mine = self.kept.pop(call, {})
        if self._worn_by is call:
            self._worn_by = None
            return self._undo(mine)
        return [f"{change.text}: put back" for change in mine.values() if change.differs(change.after)]

    def _undo(self, changes: Changes) -> list[str]:
        return self._each(reversed(changes.values()), Change.put_back, "put back")

    def _each(self, changes: Iterable[Change], apply: Callable[[Change], bool], what: str) -> list[str]:
        """Notes on those where `apply` says True, or fails."""
        notes: list[str] = []
        self._putting_back = True
        try:
            for change in changes:
                try:
                    if apply(change):
                        notes.append(f"{change.text}: {what}")
                except (OSError, ValueError, TypeError) as error:
                    notes.append(f"{change.text}: could not be {what}: {error}")
        finally:
            self._putting_back = False
        return notes

    def note(self, text: str) -> None:
        """Something to tell the running call."""
        if not self.loading:
            self._notes.append(text)
            self.changed = True

    def _changing(self, key: object, change: Change) -> None:
        """`key` changes; the first time counts."""
        if self.loading or self._putting_back or key in self._changes:
            return
        self._changes[key] = change
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
            text = f"changed the working directory to {_current_folder()!r}"
            self._changing("cwd", Change(text, before, _current_folder, os.chdir))

        _replace(os, name, change)
        if real in os.supports_fd:
            os.supports_fd.add(change)

    def _guard_environment(self) -> None:
        real_put, real_unset = os.putenv, os.unsetenv

        def putenv(name: Any, value: Any) -> None:
            self._changing_variable(name, value)
            real_put(name, value)

        def unsetenv(name: Any) -> None:
            self._changing_variable(name, None)
            real_unset(name)

        # os.environ calls these two by their names in `os`, before it changes its own table.
        _replace(os, "putenv", putenv)
        _replace(os, "unsetenv", unsetenv)

    def _changing_variable(self, name: Any, value: Any) -> None:
        if self.loading or self._putting_back:
            return
        variable = os.fsdecode(name)
        key = ("environ", variable)
        if key not in self._changes:
            text = f"changed the environment variable {variable}"
            self._changing(key, _VariableChange(text, variable, os.environ.get(variable)))
        change = self._changes[key]
        assert isinstance(change, _VariableChange)
        change.latest = None if value is None else os.fsdecode(value)

    def _guard_umask(self) -> None:
        real = os.umask

        def read() -> int:
            now = real(0)
            real(now)
            return now

        def umask(mask: int) -> int:
            before = real(mask)
            if mask != before:
                self._changing("umask", Change(f"changed the umask to {mask:#o}", before, read, real))
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
                text = f"changed the handler of {name}"
                self._changing(
                    ("signal", signalnum),
                    Change(
                        text,
                        before,
                        lambda: signal.getsignal(signalnum),
                        lambda value: real(signalnum, value),
                        operator.is_not,
                    ),
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
                text = "changed the signal mask"
                change = Change(
                    text, before, lambda: real(signal.SIG_BLOCK, ()), lambda value: real(signal.SIG_SETMASK, value)
                )
                self._changing("signal mask", change)
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
            self._changing("alarm", Change(text, False, lambda: True, lambda _: None))  # the hub takes it back

    def _guard_locale(self) -> None:
        # locale.setlocale goes through this one, whether `locale` is imported before or after.
        real = _locale.setlocale

        def setlocale(category: int, locale: str | None = None, /) -> str:
            if locale is None:
                return real(category)
            before = real(category)
            after = real(category, locale)
            text = f"changed the locale to {after!r}"
            self._changing(
                ("locale", category),
                Change(text, before, lambda: real(category), lambda value: _set_locale(real, category, value)),
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


class _VariableChange(Change):
    """Of the environment, where `os.environ` does not know what `os.putenv` did."""

    __slots__ = ("latest",)

    def __init__(self, text: str, variable: str, before: str | None) -> None:
        super().__init__(text, before, lambda: self.latest, lambda value: _set_variable(variable, value))
        self.latest = before


def _set_variable(variable: str, value: str | None) -> None:
    if value is not None:
        os.environ[variable] = value
    else:
        os.environ.pop(variable, None)
        os.unsetenv(variable)


def _set_locale(real: Callable[..., str], category: int, value: str) -> None:
    try:
        real(category, value)
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

    is_told: Callable[[str], bool] | None = None
    """Hears what is written. True: it was told in another way already, and is not written."""

    def write(self, text: str) -> int:
        if self.is_told is not None and self.is_told(text):
            return len(text)
        return super().write(text)

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
