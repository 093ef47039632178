"""The codec `pickle`: functions by reference where an executor can import them, else by value, by cloudpickle.

**Names of `__main__`.** The caller's main module is not imported in executors, so its functions and classes travel by
value, again with each call. An executor gives all of them one namespace, a `__main__` of its own, so that an
initializer can set a global that other functions read. Each global that comes along has a version, which rises when
the caller's name means another object than when it was sent last: an executor takes a version that is new to it, and
keeps what its own code has made of the name otherwise.

**Classes that travel by value.** A process takes what is in such a class once, and of a class of its own never: else
each call would undo what an initializer set on it, and each result would put copies into the caller's class.

Both ends run the same code as the same user: nothing here is safe with an end that is hostile, so that a pool with
this codec has no sandbox. A worker only carries the bytes.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import typing
from collections import ChainMap
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

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


def make_cached(called: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(called)


def make_cached_property(called: Callable[..., Any], name: str | None) -> Any:
    made = functools.cached_property(called)
    if name is not None:  # a class that travels by value gives its parts no name
        made.__set_name__(object, name)
    return made


def make_new_type(name: str, supertype: Any) -> Any:
    new_type: Any = typing.NewType  # type checkers take it for a declaration
    made = new_type(name, supertype)
    made.__module__ = _MAIN
    return made


def _reduce_if_main(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of a kind that is otherwise found by its name."""
    return lambda obj: reduce(obj) if obj.__module__ == _MAIN else obj.__reduce__()


_REDUCE: Final[dict[type, Callable[[Any], Any]]] = {
    functools._lru_cache_wrapper: _reduce_if_main(lambda c: (make_cached, (c.__wrapped__, c.cache_parameters()))),
    functools.cached_property: lambda own: (make_cached_property, (own.func, own.attrname)),  # has a lock before 3.12
    typing.NewType: _reduce_if_main(lambda new: (make_new_type, (new.__name__, new.__supertype__))),
    typing.ParamSpec: _reduce_if_main(lambda spec: (typing.ParamSpec, (spec.__name__,))),
    typing.TypeVarTuple: _reduce_if_main(lambda many: (typing.TypeVarTuple, (many.__name__,))),
    WeakKeyDictionary: lambda weak: (WeakKeyDictionary, (dict(weak),)),  # what `functools.singledispatch` has found
}
"""What cloudpickle leaves to its name in `__main__`, or cannot write."""

_complete: Final[WeakSet[type]] = WeakSet()
"""Classes that travel by value and are whole here: made here, or finished."""


def find_class(make: Callable[..., type], *args: Any) -> type:
    """The class that came before, so that neither its metaclass nor `__init_subclass__` hear of it again, or a new one,
    with nothing in it yet."""
    known: type | None = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(args[-2])
    return make(*args) if known is None else known


def finish_class(made: type, state: Any) -> None:
    """Give a class that came by value what is in it, unless it has that."""
    if made not in _complete:
        cloudpickle.cloudpickle._class_setstate(made, state)
        _complete.add(made)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """What both ends write alike."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and reduced[-1] is cloudpickle.cloudpickle._class_setstate:
            _complete.add(obj)
            make, args, *state, _ = reduced
            return find_class, (make, *args), *state, finish_class
        return reduced


class CallPickler(_Pickler):
    """Writes a call in the caller's process."""

    dispatch_table = ChainMap(_REDUCE, cloudpickle.Pickler.dispatch_table)

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
        managers = sys.modules.get("multiprocessing.managers")
        if managers is not None and isinstance(obj, managers.BaseProxy):
            return _reduce_proxy(obj)
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


def _reduce_proxy(proxy: Any) -> Any:
    """Of a `multiprocessing.Manager`: an executor, which `multiprocessing` did not start, has not its key."""
    rebuild, (*place, options) = proxy.__reduce__()
    return rebuild, (*place, {**options, "authkey": bytes(proxy._authkey)})


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
        make_cached,
        make_cached_property,
        make_new_type,
        find_class,
        finish_class,
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
        return _dump((VALUE, value))

    def write_raised(self, error: BaseException, *, initializer: bool = False) -> bytes:
        tag = INITIALIZER_RAISED if initializer else RAISED
        return pickle.dumps((tag, Raised.of(error, _write_exception(error))), protocol=PROTOCOL)


def _write_exception(error: BaseException) -> bytes:
    """Empty for one that cannot be written."""
    try:
        return _dump(error)
    except CallInterrupted:
        raise
    except BaseException:  # noqa: BLE001 - whatever its own code does: it is told by name and text
        return b""


def _dump(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=PROTOCOL).dump(value)
    return file.getvalue()


def _read_exception(body: bytes) -> BaseException | None:
    """None for one that cannot be made again, as where `__init__` wants other arguments than `args`."""
    if not body:
        return None
    try:
        found = pickle.loads(body)  # noqa: S301 - see above
    except Exception:  # noqa: BLE001 - whatever its own code does: it is told by name and text
        return None
    return found if isinstance(found, BaseException) else None
