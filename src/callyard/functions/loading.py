"""A bundle in its executor: imported once, under its real module name, and described.

Anything may happen while user code is imported; whatever does becomes a `LoadFailure` with file and line. This module
is also imported by the worker, for `refuse_while_importing`, so pydantic is loaded only with a bundle.
Source: call-execution Decisions ("Bundle and digest"), X84.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from callyard.errors import ErrorKind, UsageError
from callyard.functions.completion import completers
from callyard.functions.function import COMPLETER, NO_PROMISES, READ_ONLY, TOOL, Declared, Function, Promises
from callyard.functions.imports import list_imports, parse_source
from callyard.ids import FunctionId
from callyard.wire.messages import DescribedFunction, WireError

if TYPE_CHECKING:
    from callyard.functions.signature import Invocable

STACK_CHARS_MAX: Final = 16 * 1024
_OWN_NAME: Final = "callyard"
_PACKAGES: Final = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "psycopg2": "psycopg2-binary",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Well-known packages whose name is not that of their module."""

_importing = False
"""A bundle of this process is being imported right now."""


class LoadFailure(Exception):
    """A bundle, or one function of it, cannot be used. `error` is what the worker is told."""

    def __init__(self, error: WireError) -> None:
        super().__init__(error.message)
        self.error = error


@contextmanager
def importing() -> Iterator[None]:
    """In this block user code is imported, which is not to start Callyard."""
    global _importing
    before, _importing = _importing, True
    try:
        yield
    finally:
        _importing = before


def refuse_while_importing() -> None:
    """Raise `UsageError` when user code starts Callyard while an executor imports that code."""
    if _importing:
        raise UsageError(
            "this file starts Callyard while an executor imports it, which would start executors without end:"
            ' put that part under `if __name__ == "__main__":`'
        )


class LoadedBundle:
    """An imported target and its callable functions."""

    def __init__(self, path: Path, module: ModuleType) -> None:
        self.path = path
        self.module = module
        self._declared = _declared_functions(module, path)
        self._callables: dict[str, tuple[Callable[..., Any], Promises, Declared]] = {
            name: (found.target, found.promises, found.declared) for name, found in self._declared.items()
        } or {name: (found, NO_PROMISES, TOOL) for name, found in plain_functions(module)}
        self._add_completers()
        self._invocables: dict[str, Invocable] = {}

    @property
    def has_async(self) -> bool:
        """Whether any function is an `async def`, so that the executor needs an event loop."""
        return any(inspect.iscoroutinefunction(inspect.unwrap(target)) for target, _, _ in self._callables.values())

    def get(self, entry_selector: str) -> Invocable:
        """The function of a selector, `module:name`; built once. Raises `LoadFailure`."""
        found = self._invocables.get(entry_selector)
        if found is None:
            module, _, name = entry_selector.rpartition(":")
            if module != self.module.__name__ or not self._has(name):
                known = ", ".join(self._callables) or "none"
                raise _failure(ErrorKind.NOT_FOUND, f"no function {entry_selector!r}; there are: {known}")
            found = self._invocables[entry_selector] = self._build(name)
        return found

    def _has(self, name: str) -> bool:
        """Whether there is a function of that name: one that is offered, or any callable, once it was named."""
        if name in self._callables:
            return True
        found = vars(self.module).get(name)
        if not callable(found):
            return False
        if isinstance(found, Function):
            self._callables[name] = (found.target, found.promises, found.declared)
        else:
            from callyard.functions.callables import as_function

            try:
                self._callables[name] = (as_function(name, found), NO_PROMISES, TOOL)
            except (TypeError, ValueError) as error:
                raise _failure(ErrorKind.INTERNAL, str(error)) from error
        return True

    def names(self) -> list[str]:
        """Of the functions that can be called."""
        return list(self._callables)

    def find_name(self, function: object) -> str | None:
        """The name by which a function object, declared or plain, can be called; None: it cannot be called here."""
        plain = function.target if isinstance(function, Function) else function
        return next((name for name, (target, _, _) in self._callables.items() if target is plain), None)

    def _add_completers(self) -> None:
        """Functions that a `complete=` names, and that are not declared themselves, can be called as well.

        Raises `LoadFailure` for a name that no function has.
        """
        for name, declared in [(name, declared) for name, (_, _, declared) in self._callables.items()]:
            named = [source for source in declared.complete.values() if isinstance(source, str)]
            for source in [*named, *completers(declared.complete)]:
                found = vars(self.module).get(source) if isinstance(source, str) else source
                plain = found.target if isinstance(found, Function) else found
                if not inspect.isfunction(plain):
                    error = ValueError(f"{name}: complete= names {source!r}, and there is no such function")
                    raise self._unfit(name, error)
                own = source if isinstance(source, str) else self.find_name(plain) or plain.__name__
                taken = self._callables.setdefault(own, (plain, READ_ONLY, COMPLETER))
                if taken[0] is not plain:
                    raise self._unfit(name, ValueError(f"{name}: two functions have the name {own!r}"))

    def describe(self, names: Iterable[str] = ()) -> tuple[list[DescribedFunction], list[str]]:
        """Every function, in the order of the module, and the installed packages that the bundle imports.

        `names`: callables that were asked for by name, which need no declaration; one that is not there is left out.
        A declared function that JSON cannot reach is a `LoadFailure`. Without any `@function` the module's public
        functions are all there is to go by, and helpers that JSON cannot reach are left out.
        """
        described: list[DescribedFunction] = []
        left_out: list[LoadFailure] = []
        named = {name for name in names if self._has(name)}
        for name in self._callables:
            try:
                described.append(self._describe(name))
            except LoadFailure as failure:
                if self._declared or name in named:
                    raise
                left_out.append(failure)
        if left_out and not described:
            raise left_out[0]
        if not described:
            file = _relative(self.path, self.module.__file__ or self.module.__name__)
            raise _failure(
                ErrorKind.NOT_FOUND,
                f"{file}: no functions: define one with def, or declare it with @function",
                file=file,
            )
        return described, list_installed_packages(self.path)

    def _describe(self, name: str) -> DescribedFunction:
        from callyard.functions.signature import UnfitSignature

        invocable = self.get(f"{self.module.__name__}:{name}")
        try:
            return DescribedFunction(
                name=FunctionId(name),
                entry_selector=f"{self.module.__name__}:{name}",
                signature=invocable.signature_text(),
                description=invocable.description(),
                input_schema=_to_raw(invocable.input_schema()),
                output_schema=_to_raw(invocable.output_schema()),
                promises=msgspec.Raw(msgspec.json.encode(invocable.promises)),
                takes_row=invocable.takes_row,
                is_async=invocable.is_async,
                line=invocable.line,
                role=invocable.declared.role,
                title=invocable.declared.title,
                uri=invocable.declared.uri,
                mime_type=invocable.declared.mime_type,
                completions=msgspec.Raw(msgspec.json.encode(invocable.completions(self.find_name))),
                own_schema=invocable.declared.input_schema is not None,
                binary=invocable.may_return_binary,
                defined=f"{invocable.target.__module__}:{invocable.target.__qualname__}",
            )
        except UnfitSignature as error:
            raise self._unfit(name, error) from error

    def _build(self, name: str) -> Invocable:
        from callyard.functions.signature import Invocable, UnfitSignature

        target, promises, declared = self._callables[name]
        try:
            return Invocable(name, target, promises, declared)
        except (UnfitSignature, UsageError) as error:  # its signature, or a schema of its own
            raise self._unfit(name, error) from error

    def _unfit(self, name: str, error: Exception) -> LoadFailure:
        code = inspect.unwrap(self._callables[name][0]).__code__
        file, line = _relative(self.path, code.co_filename), code.co_firstlineno
        return _failure(ErrorKind.INTERNAL, f"{file}:{line}: {error}", file=file, line=line)


def load_bundle(path: str | Path, module: str) -> LoadedBundle:
    """Import `module` from the bundle's folder, which goes first on `sys.path`. Raises `LoadFailure`.

    An executor serves one bundle for its life: nothing is put back.
    """
    folder = Path(path).absolute()
    top = module.partition(".")[0]
    taken = sys.modules.get(top)
    if taken is not None and not any(_is_inside(folder, place) for place in _places(taken)):
        where = next(iter(_places(taken)), "Python itself")
        raise _failure(ErrorKind.INTERNAL, f"the module name {top!r} is taken by {where}: rename the file or folder")
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # the folder is read-only, and shared with other executors
    importlib.invalidate_caches()
    try:
        with importing():
            imported = importlib.import_module(module)
    except BaseException as error:
        raise _explain(folder, error) from error
    if not _is_inside(folder, getattr(imported, "__file__", None)):
        where = next(iter(_places(imported)), "Python itself")
        raise _failure(ErrorKind.INTERNAL, f"the module name {module!r} is taken by {where}: rename the file or folder")
    from callyard.functions import signature  # noqa: F401 - now, so that no call pays for pydantic

    return LoadedBundle(folder, imported)


def list_installed_packages(path: Path) -> list[str]:
    """Distributions outside the bundle that its files import, as `name==version`, sorted. Source: X86."""
    names: set[str] = set()
    own: set[str] = {_OWN_NAME}
    for file in path.rglob("*.py"):
        parts = file.relative_to(path).with_suffix("").parts
        own.add(parts[0])
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        try:
            tree = parse_source(file.read_bytes(), str(file))
        except (SyntaxError, ValueError):
            continue
        names |= {wanted.module.partition(".")[0] for wanted in list_imports(tree, module, is_package=is_package)}
    return sorted({found for name in names - own - sys.stdlib_module_names for found in _distributions(name)})


def _distributions(name: str) -> Iterator[str]:
    """The distributions that provide a top-level name: most often the one of the same name."""
    from importlib import metadata  # for a description only, never for a call

    try:
        found = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        for other in metadata.packages_distributions().get(name, ()):
            yield f"{other}=={metadata.version(other)}"
    else:
        yield f"{found.metadata['Name']}=={found.version}"


def _declared_functions(module: ModuleType, path: Path) -> dict[str, Function[..., Any]]:
    """Functions with `@function` in the module's namespace, its own and those of other modules of the bundle."""
    found: dict[str, Function[..., Any]] = {}
    seen: set[int] = set()
    for name, value in vars(module).items():
        if not isinstance(value, Function) or id(value) in seen:
            continue
        if _is_inside(path, inspect.unwrap(value.target).__code__.co_filename):
            seen.add(id(value))
            found[name] = value
    return found


def plain_functions(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions that a module defines itself, by name; of a package, those of its own modules too."""
    inside = f"{module.__name__}." if hasattr(module, "__path__") else ""
    for name, value in vars(module).items():
        if name.startswith("_") or not inspect.isfunction(value):
            continue
        home = value.__module__ or ""
        if home != module.__name__ and not (inside and home.startswith(inside)):
            continue
        if not inspect.isgeneratorfunction(value) and not inspect.isasyncgenfunction(value):
            yield name, value


def _explain(path: Path, error: BaseException) -> LoadFailure:
    """`file.py:12: NameError: …`, at the innermost line of the bundle's own code."""
    frames = [
        (_relative(path, frame.f_code.co_filename), line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_inside(path, frame.f_code.co_filename)
    ]
    file, line = (frames[-1][0], frames[-1][1]) if frames else ("", 0)
    if isinstance(error, SyntaxError) and error.filename and _is_inside(path, error.filename):
        file, line = _relative(path, error.filename), error.lineno or 1
    text = _message(error)
    if isinstance(error, SyntaxError):
        text = f"{type(error).__name__}: {error.msg}"
    if isinstance(error, SystemExit):
        text = f'SystemExit: {error.code}; it ends when imported: guard that part with `if __name__ == "__main__":`'
    details: dict[str, Any] = {}
    if isinstance(error, ModuleNotFoundError) and error.name:
        details["missing_module"] = error.name
        text += explain_missing(path, error.name)
    elif isinstance(error, ImportError) and "relative import" in str(error):
        text += (
            " (a relative import needs a package around the file: name it as a module from the folder above, such as"
            f" package.{Path(file).stem or 'module'}, or put an __init__.py beside it)"
        )
    if isinstance(error, FileNotFoundError) and _is_inside(path, str(error.filename)):
        text += explain_unsent(path, str(error.filename))
    text = text.replace(f"{path}/", "")
    place = f"{file}:{line}: " if file else ""
    stack = _format_stack(path, error)
    return _failure(ErrorKind.INTERNAL, place + text, file=file, line=line, stack=stack, **details)


def explain_missing(path: Path, module: str) -> str:
    """What mends that a module was not found, by the interpreter that looked for it."""
    top = module.partition(".")[0]
    if _is_bundled(path, top):
        return f" ({module.replace('.', '/')}.py is not in the bundle, which has what import statements name)"
    python = shlex.quote(sys.executable)
    package = _PACKAGES.get(top, top)
    command = f"{python} -m pip install {package}"
    if importlib.util.find_spec("pip") is None:
        command = f"uv pip install --python {python} {package}"
    return f" ({top} is neither in the bundle nor installed for {sys.executable}; if it is a package: {command})"


def explain_unsent(path: Path, name: str) -> str:
    """What mends that a file below the bundle's folder was not found."""
    glob = shlex.quote(_relative(path, name))
    return f" (data files are sent along only when they are included: --include {glob})"


def _is_bundled(path: Path, top: str) -> bool:
    return (path / f"{top}.py").is_file() or (path / top).is_dir()


def _format_stack(path: Path, error: BaseException) -> str:
    """The traceback from the bundle's own code on, with paths relative to the bundle."""
    summary = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(summary) if _is_inside(path, frame.filename)), len(summary))
    lines: list[str] = []
    for frame in summary[first:]:
        if "importlib" in frame.filename:
            continue
        lines.append(f'  File "{_relative(path, frame.filename)}", line {frame.lineno}, in {frame.name}')
        if frame.line:
            lines.append(f"    {frame.line}")
    lines.append(_message(error))
    return "\n".join(lines).replace(f"{path}/", "")[-STACK_CHARS_MAX:]


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - __str__ is user code
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _failure(kind: ErrorKind, message: str, **details: Any) -> LoadFailure:
    return LoadFailure(WireError(kind, message, details=details))


def _is_inside(path: Path, filename: str | None) -> bool:
    return filename is not None and Path(filename).is_relative_to(path)


def _places(module: ModuleType) -> list[str]:
    """Where a module comes from: its file, or the folders of a package without `__init__`."""
    file = getattr(module, "__file__", None)
    return [file] if file else list(getattr(module, "__path__", ()))


def _relative(path: Path, filename: str) -> str:
    return Path(filename).relative_to(path).as_posix() if _is_inside(path, filename) else Path(filename).name


def _to_raw(schema: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(schema, enc_hook=str))
