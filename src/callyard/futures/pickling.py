"""The codec `pickle`: functions by reference where an executor can import them, else by value, by cloudpickle.

**Names of `__main__`.** The caller's main module is not imported in executors, so its functions and classes travel by
value, again with each call. An executor gives all of them one namespace, a `__main__` of its own, so that an
initializer can set a global that other functions read. Each global that comes along has a version, which rises when
the caller's name means another object than when it was sent last: an executor takes a version that is new to it, and
keeps what its own code has made of the name otherwise.

Both ends run the same code as the same user: nothing here is safe with an end that is hostile, so that a pool with
this codec has no sandbox. A worker only carries the bytes.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from callyard.errors import UsageError
from callyard.executor.budget import CallInterrupted
from callyard.functions.function import Function
from callyard.futures.raised import INITIALIZER_RAISED, RAISED, VALUE, Raised
from callyard.futures.setup import Call

try:
    import cloudpickle  # type: ignore[import-untyped]
except ImportError as error:
    raise UsageError("PoolExecutor with codec='pickle' needs cloudpickle: pip install cloudpickle") from error

PROTOCOL: Final = 5
_MAIN: Final = "__main__"


class MainGlobals:
    """Versions of the globals of `__main__` that were sent: of one pool, in the caller's process."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[object, int]] = {}
        """The object that a name meant when it was sent last, kept so that no other takes its place in memory."""

    def with_versions(self, values: dict[str, Any]) -> dict[str, tuple[int, Any]]:
        return {name: (self._version(name, value), value) for name, value in values.items()}

    def _version(self, name: str, value: object) -> int:
        sent, version = self._sent.get(name, (None, 0))
        if version == 0 or sent is not value:
            version += 1
            self._sent[name] = (value, version)
        return version


class CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes a call in the caller's process."""

    def __init__(self, file: io.BytesIO, main: MainGlobals) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self._main = main
        self._namespace = vars(sys.modules[_MAIN])
        self.globals_ref[id(self._namespace)] = _MainNamespace()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is FunctionType and obj in _BY_REFERENCE:
            return NotImplemented
        if kind is Function and obj.__module__ == _MAIN:
            return Function, (obj.target, obj.promises, obj.declared)
        if kind is CodeType:
            _, made_of = self.dispatch_table[CodeType](obj)
            return make_code, (made_of, obj.co_filename)
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented or kind is not FunctionType or obj.__globals__ is not self._namespace:
            return reduced
        make, made_of, (attributes, slots), _, _, set_state = reduced
        sent = self._main.with_versions(slots["__globals__"])
        state = (set_state, attributes, {**slots, "__globals__": {}}, sent)
        return make, made_of, state, None, None, set_main_state


def make_code(made_of: tuple[Any, ...], filename: str) -> CodeType:
    """Code of a function that travels by value; cloudpickle leaves out the file that tracebacks name."""
    return CodeType(*made_of).replace(co_filename=filename)


class _MainNamespace:
    """Stands for the globals of `__main__` in what is written."""

    def __reduce__(self) -> Any:
        return main_namespace, ()


def main_namespace() -> dict[str, Any]:
    """In an executor: what stands for the globals of the caller's `__main__`."""
    return vars(_standing_main())


def set_main_state(
    made: FunctionType, state: tuple[Callable[..., None], dict[str, Any], dict[str, Any], dict[str, tuple[int, Any]]]
) -> None:
    """In an executor: finish a function of the caller's `__main__`, and take the globals that are new."""
    set_state, attributes, slots, sent = state
    set_state(made, (attributes, slots))
    main = _standing_main()
    for name, (version, value) in sent.items():
        if version > main.versions.get(name, 0):
            main.versions[name] = version
            vars(main)[name] = value


class StandingMain(ModuleType):
    """The `__main__` of an executor, in which names of the caller's are."""

    __slots__ = ("instead_of", "versions")

    def __init__(self, instead_of: ModuleType) -> None:
        super().__init__(_MAIN)
        self.versions: dict[str, int] = {}
        self.instead_of = instead_of
        """The executor's own, kept alive."""


def _standing_main() -> StandingMain:
    main = sys.modules[_MAIN]
    assert isinstance(main, StandingMain), "calls of a pool are read by its executors only"
    return main


def run_chunk(called: Callable[..., Any], rows: list[tuple[Any, ...]]) -> list[Any]:
    return [called(*args) for args in rows]


_BY_REFERENCE: Final = frozenset(
    {
        run_chunk,
        make_code,
        main_namespace,
        set_main_state,
        cloudpickle.cloudpickle._make_function,
        cloudpickle.cloudpickle._function_setstate,
        cloudpickle.cloudpickle._make_empty_cell,
    }
)
"""Functions in what is written for nearly every function; cloudpickle would look each of them up again."""


class PickleCodec:
    """The caller's end."""

    name: Final = "pickle"

    def __init__(self) -> None:
        self._main = MainGlobals()

    def admit(self, call: Call) -> Call:
        """What is kept of a call until it is sent: as `concurrent.futures` does, the objects."""
        return call

    def make_chunk(self, called: Callable[..., Any], rows: list[tuple[Any, ...]]) -> Call:
        return run_chunk, (called, rows), {}

    def write_call(self, kept: Call) -> bytes:
        """Raises whatever pickling raises."""
        file = io.BytesIO()
        CallPickler(file, self._main).dump(kept)
        return file.getvalue()

    def read_answer(self, answer: memoryview) -> tuple[int, Any]:
        """Tag and value, or tag and exception. Raises whatever unpickling raises."""
        tag, value = pickle.loads(answer)  # noqa: S301 - see above
        return (VALUE, value) if tag == VALUE else (tag, value.to_exception(_read_exception(value.body)))


class PickleServing:
    """The executor's end."""

    def __init__(self) -> None:
        sys.modules[_MAIN] = StandingMain(sys.modules[_MAIN])

    def read_call(self, call: bytes) -> Call:
        read: Call = pickle.loads(call)  # noqa: S301 - see above
        return read

    def write_value(self, value: Any) -> bytes:
        written: bytes = cloudpickle.dumps((VALUE, value), protocol=PROTOCOL)
        return written

    def write_raised(self, error: BaseException, *, initializer: bool = False) -> bytes:
        tag = INITIALIZER_RAISED if initializer else RAISED
        return pickle.dumps((tag, Raised.of(error, _write_exception(error))), protocol=PROTOCOL)


def _write_exception(error: BaseException) -> bytes:
    """Empty for one that cannot be written."""
    try:
        written: bytes = cloudpickle.dumps(error, protocol=PROTOCOL)
    except CallInterrupted:
        raise
    except BaseException:  # noqa: BLE001 - whatever its own code does: it is told by name and text
        return b""
    return written


def _read_exception(body: bytes) -> BaseException | None:
    """None for one that cannot be made again, as where `__init__` wants other arguments than `args`."""
    if not body:
        return None
    try:
        found = pickle.loads(body)  # noqa: S301 - see above
    except Exception:  # noqa: BLE001 - whatever its own code does: it is told by name and text
        return None
    return found if isinstance(found, BaseException) else None
