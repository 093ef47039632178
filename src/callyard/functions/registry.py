"""What can be called, by name: functions that an executor described, and tools of this process.

A process that runs a worker never imports the code of its target (D6): a registry for a target holds its bundle, and
its functions once a worker had it described. Tools of this process are added one by one, or with the module that the
caller chose to import. Source: tool-dispatch D1, D6, D50.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack, cast, get_args, overload

import msgspec

from callyard.errors import ProtocolError, UsageError
from callyard.functions.bundle import Bundle
from callyard.functions.calling import explain_no_function, explain_stranger, find_home
from callyard.functions.checking import (
    CheckedArguments,
    Checker,
    LocalHandler,
    check_result,
    compile_described,
    compile_own,
)
from callyard.functions.completion import Completion, completers, read_completions
from callyard.functions.function import (
    COMPLETER,
    NO_PROMISES,
    READ_ONLY,
    RESULT_BYTES_MAX,
    TOOL,
    Declared,
    Function,
    Isolation,
    PromiseArguments,
    Promises,
    Role,
    build_promises,
)
from callyard.functions.imports import explain_absence
from callyard.functions.misfits import ArgumentsMisfit, Problem
from callyard.functions.target import (
    FindPackage,
    Target,
    explain_unbundled,
    find_module,
    find_target,
    is_installed,
)
from callyard.functions.uris import match_uri, parse_uri
from callyard.ids import Digest, FunctionId
from callyard.wire.messages import DescribedFunction, DescribedPayload

if TYPE_CHECKING:
    from callyard.functions.json_schema import JsonSchema
    from callyard.functions.outgoing import Outgoing

FUNCTIONS_MAX: Final = 10_000
"""Most functions of one registry."""
_PROMISES: Final = msgspec.json.Decoder(Promises)
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_ANYTHING: Final = msgspec.Raw(b"{}")
_ROLES: Final[tuple[str, ...]] = get_args(Role)

F = TypeVar("F", bound=Callable[..., Any])


class Argument(msgspec.Struct, frozen=True):
    """One argument of a prompt or a resource template, which is a text."""

    name: str
    description: str = ""
    required: bool = False


class FunctionSpec(msgspec.Struct, frozen=True, dict=True):
    """One function as callers see it. Schemas are JSON, as the executor sent them."""

    name: FunctionId
    digest: Digest
    entry_selector: str
    """`module:name` inside the bundle."""
    signature: str = "()"
    description: str = ""
    input_schema: msgspec.Raw = msgspec.Raw(b"{}")
    output_schema: msgspec.Raw = msgspec.Raw(b"{}")
    promises: Promises = Promises()
    takes_row: bool = False
    """A row of a call list is the whole value of its one object parameter."""
    is_async: bool = False
    line: int = 0
    role: Role = "tool"
    title: str = ""
    uri: str = ""
    """Of a resource; with `{name}` in it, of a template."""
    mime_type: str = ""
    """Of a resource, as declared; empty: each answer says its own."""
    completions: dict[str, Completion] = {}
    """How arguments of a prompt or a template are completed, by parameter."""
    own_schema: bool = False
    """`input_schema` is the author's own; else it shows the signature."""
    binary: bool = False
    """Its results may hold bytes, arrays or tables."""
    defined: str = ""
    """`module:qualified name` of its definition inside the bundle; empty: a tool of this process."""

    @property
    def handler(self) -> LocalHandler | None:
        """What runs it in this process; None: an executor does."""
        return None

    @property
    def isolation(self) -> Isolation:
        """Where it runs (D50). A described function is never run in this process, whatever it asks for."""
        return "executor"

    @property
    def result_bytes_max(self) -> int:
        return self.promises.max_result_bytes or RESULT_BYTES_MAX

    @property
    def is_template(self) -> bool:
        """Whether its URI has variables, so that it is many resources."""
        return bool(self.uri) and bool(parse_uri(self.uri).names)

    def match(self, uri: str) -> dict[str, str] | None:
        """The arguments by which this resource is read at `uri`; None: it is not there."""
        return match_uri(self.uri, uri) if self.role == "resource" else None

    def arguments(self) -> list[Argument]:
        """Of a prompt or a template, in the order of the signature."""
        schema = msgspec.json.decode(self.input_schema)
        required = schema.get("required", ())
        return [
            Argument(name, part.get("description", ""), name in required)
            for name, part in schema.get("properties", {}).items()
        ]

    def check(self, args: bytes | Mapping[str, Any], *, repair: bool = False) -> CheckedArguments:
        """Check the arguments of one call: JSON of an object, or Python values by name.

        `repair`: make what nearly fits fit (D5). Runs no code of the user's. Raises `ArgumentsMisfit`, with every
        error; for some functions the last word comes at the attempt (`checking`).
        """
        return self.checker.check(args, repair=repair)

    def check_result(self, output: bytes) -> None:
        """Raises `ResultMisfit` for a result that is too large, or breaks the output schema (D26)."""
        check_result(self._result_schema, output, self.result_bytes_max)

    @functools.cached_property
    def checker(self) -> Checker:
        return Checker(schema=lambda: _compile(self))

    @functools.cached_property
    def _result_schema(self) -> JsonSchema | None:
        return None if bytes(self.output_schema) == b"{}" else compile_described(self.output_schema)


class LocalSpec(FunctionSpec, frozen=True, kw_only=True):
    """A tool of this process."""

    handler: LocalHandler
    checker: Checker
    result_schema: JsonSchema | None = None
    """Its own; None: that of its signature, if it has one."""

    @property
    def isolation(self) -> Isolation:
        return "thread" if self.handler.in_thread else "inline"

    @functools.cached_property
    def _result_schema(self) -> JsonSchema | None:
        return self.result_schema if self.result_schema is not None else super()._result_schema


class UnknownFunction(UsageError, KeyError):
    """No function of that name; the message names those that are close."""

    def __str__(self) -> str:  # KeyError would show the message as a repr
        return str(self.args[0])


class Registry:
    """Functions by name, in the order they were added: tools of this process, those of a bundle, or both.

    Tools, prompts, resources and completers share one namespace: a name says which function it is, and the function
    says what it is for.

    ```python
    registry = Registry()

    @registry.tool(idempotent=True)
    async def add(a: int, b: int) -> int: ...
    ```
    """

    def __init__(
        self,
        bundle: Bundle | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        include: Iterable[str] = (),
        target: Target | None = None,
    ) -> None:
        """`bundle`: the files whose functions a worker describes and runs. `target` (or its file, `path`) and
        `include`: where it was collected from, so that it can be read again."""
        self._bundle = bundle
        self.target = target
        self.path = target.path if target is not None else None if path is None else Path(path).absolute()
        self.include = tuple(include)
        self.installed_packages: tuple[str, ...] = ()
        """Distributions outside the bundle that it imports."""
        self.is_described = False
        self._specs: dict[str, FunctionSpec] = {}
        self._outgoing: dict[object, Outgoing] = {}
        """By function object, those that were called so; anew with each change of the functions."""

    @property
    def has_bundle(self) -> bool:
        """Whether there are functions for a worker, described already or not."""
        return self._bundle is not None

    @property
    def bundle(self) -> Bundle:
        """Raises `UsageError` when all there is are tools of this process."""
        if self._bundle is None:
            raise UsageError(
                "this registry has no file of functions, which is what a worker runs: use Registry.for_target(path), or"
                " give the registry to a Dispatcher without a worker"
            )
        return self._bundle

    @classmethod
    def for_target(
        cls,
        target: str | os.PathLike[str] | Target,
        *,
        include: Iterable[str] = (),
        find_package: FindPackage | None = None,
    ) -> Self:
        """The registry of a file, a module or a folder, whose functions are known once a worker had it described.

        A function named with it (`FILE.py:NAME`) is among them, whatever callable of its namespace it is. `include`
        and `find_package` as for `Bundle.collect` and `find_target`. Raises `UsageError` for what is no target.
        """
        include = tuple(include)
        found = target if isinstance(target, Target) else find_target(target, find_package=find_package)
        return cls(Bundle.collect(found, include), include=include, target=found)

    @property
    def named(self) -> list[str]:
        """Functions that were named with the target: they need no `@function`."""
        return [self.target.function] if self.target is not None and self.target.function is not None else []

    def read_again(self) -> Registry:
        """What the files hold now, not described. Reads files: not for an event loop. Raises `UsageError`."""
        if self.path is None:
            raise UsageError(f"this registry did not read {self.bundle.name} from a file: there is nothing to reload")
        fresh = Registry.for_target(self.target or self.path, include=self.include)
        fresh._specs = {spec.name: spec for spec in self._specs.values() if spec.handler is not None}
        return fresh

    def become(self, other: Registry) -> None:
        """Take the place of this registry's bundle and functions, in one step: everybody who holds it sees them."""
        self._bundle = other.bundle
        self.installed_packages = other.installed_packages
        self.is_described = other.is_described
        self._specs = dict(other._specs)
        self._outgoing.clear()

    @classmethod
    def from_description(cls, bundle: Bundle, described: DescribedPayload) -> Self:
        """The registry of a bundle that an executor described. Raises as `adopt`."""
        registry = cls(bundle)
        registry.adopt(described)
        return registry

    def adopt(self, described: DescribedPayload) -> None:
        """Take the functions from an executor's answer.

        Raises `UsageError` when the bundle cannot be loaded, `ProtocolError` when the answer is not one to this bundle.
        """
        if described.error is not None:
            error = UsageError(described.error.message + self._find_missing(described.error.details))
            error.add_note(str(described.error.details.get("stack", "")))  # for --debug, and for tracebacks
            raise error
        if described.function_code_digest != self.bundle.digest:
            raise ProtocolError(f"described digest {described.function_code_digest!r}, expected {self.bundle.digest!r}")
        if len(described.functions) > FUNCTIONS_MAX:
            raise ProtocolError(f"described {len(described.functions)} functions, expected at most {FUNCTIONS_MAX}")
        specs = [self._to_spec(function) for function in described.functions]
        if len({spec.name for spec in specs}) < len(specs):
            raise ProtocolError("described two functions of one name")
        for spec in specs:
            self.add(spec)
        self.installed_packages = tuple(described.installed_packages)
        self.is_described = True

    def _find_missing(self, details: Mapping[str, Any]) -> str:
        """Where a module that an executor did not find lies on this disk, and how to bring it; empty: nowhere near."""
        missing = details.get("missing_module")
        if self.target is None or not isinstance(missing, str):
            return ""
        parts = missing.split(".")
        if not all(part.isidentifier() for part in parts):
            return ""
        for root in dict.fromkeys((self.target.root, *(self.target.root.parents[:2]))):
            file = find_module(root, parts) or find_module(root / "src", parts)
            if file is not None and not is_installed(file):
                return "\n" + explain_unbundled(self.target, file)
        return ""

    def add(self, spec: FunctionSpec, *, override: bool = False) -> None:
        """Raises `UsageError` for a name that is there, unless `override` puts `spec` in its place, or that is none."""
        if not _NAME.fullmatch(spec.name):
            raise UsageError(f"a name is 1 to 128 letters, digits, '_', '-' and '.', got {spec.name!r}: give name=…")
        replaced = self._specs.get(spec.name)
        if not override and replaced is not None:
            raise UsageError(f"there is a function {spec.name!r} already: pass override=True to replace it")
        if spec.role == "resource":
            others = (other for other in self._specs.values() if other is not replaced)
            if any(other.role == "resource" and other.uri == spec.uri for other in others):
                raise UsageError(f"there is a resource at {spec.uri} already")
        if len(self._specs) >= FUNCTIONS_MAX and spec.name not in self._specs:
            raise UsageError(f"a registry holds at most {FUNCTIONS_MAX} functions")
        self._specs[spec.name] = spec
        self._outgoing.clear()

    # --- tools of this process --------------------------------------------------------------------------------------

    @classmethod
    def from_module(cls, module: ModuleType | str) -> Self:
        """The functions of a module that this process imports, or has imported: those with `@function`; where none has
        it, the public ones that the module defines and that JSON can reach.

        The module's code runs here, and so do its functions. Raises `UsageError`, and `UnfitSignature` for a function
        with `@function` that JSON cannot reach.
        """
        from callyard.functions.loading import plain_functions
        from callyard.functions.signature import UnfitSignature

        if isinstance(module, str):
            module = importlib.import_module(module)
        found: dict[str, Any] = {name: value for name, value in vars(module).items() if isinstance(value, Function)}
        registry = cls()
        seen: set[int] = set()
        for name, value in (found or dict(plain_functions(module))).items():
            if id(value) in seen:  # a second name for the same function is no second function
                continue
            seen.add(id(value))
            try:
                registry.add_function(value, name=name)
            except UnfitSignature:
                if found:
                    raise
        for value in found.values():
            registry._add_named_completers(value.declared, module)
        if not registry._specs:
            raise UsageError(f"{module.__name__} has no functions: define one with def, or declare it with @function")
        return registry

    @overload
    def tool(self, target: F, /) -> F: ...
    @overload
    def tool(
        self,
        target: None = None,
        /,
        *,
        name: str | None = None,
        title: str = "",
        description: str = "",
        override: bool = False,
        **promises: Any,
    ) -> Callable[[F], F]: ...
    def tool(
        self,
        target: Any = None,
        /,
        *,
        name: str | None = None,
        title: str = "",
        description: str = "",
        override: bool = False,
        **promises: Any,
    ) -> Any:
        """Add the function below, bare (`@registry.tool`) or with a name and promises; see `add_function`."""

        def add(function: F) -> F:
            declared = Declared(title=title, description=description) if title or description else None
            self.add_function(function, name=name, override=override, declared=declared, **promises)
            return function

        return add if target is None else add(target)

    @overload
    def prompt(self, target: F, /) -> F: ...
    @overload
    def prompt(
        self,
        target: None = None,
        /,
        *,
        name: str | None = None,
        title: str = "",
        description: str = "",
        complete: Mapping[str, Any] | None = None,
        override: bool = False,
        **promises: Unpack[PromiseArguments],
    ) -> Callable[[F], F]: ...
    def prompt(
        self,
        target: Any = None,
        /,
        *,
        name: str | None = None,
        title: str = "",
        description: str = "",
        complete: Mapping[str, Any] | None = None,
        override: bool = False,
        **promises: Any,
    ) -> Any:
        """Add the function below as a prompt, as `@prompt` does in a file; see `add_function`."""
        declared = Declared(role="prompt", title=title, description=description, complete=complete or {})

        def add(function: F) -> F:
            self.add_function(function, name=name, override=override, declared=declared, **promises)
            return function

        return add if target is None else add(target)

    def resource(
        self,
        uri: str,
        *,
        name: str | None = None,
        title: str = "",
        description: str = "",
        mime_type: str = "",
        complete: Mapping[str, Any] | None = None,
        override: bool = False,
        **promises: Unpack[PromiseArguments],
    ) -> Callable[[F], F]:
        """Add the function below as a resource, as `@resource` does in a file; see `add_function`."""
        declared = Declared(
            role="resource", title=title, description=description, uri=uri, mime_type=mime_type, complete=complete or {}
        )

        def add(function: F) -> F:
            self.add_function(function, name=name, override=override, declared=declared, **promises)
            return function

        return add

    def add_function(
        self,
        target: Callable[..., Any],
        *,
        name: str | None = None,
        override: bool = False,
        declared: Declared | None = None,
        **promises: Any,
    ) -> FunctionSpec:
        """Add a function of this process: its signature and docstring say what it takes.

        `promises`: the fields of `Promises`; those of an `@function` hold unless given here. `declared`: what else is
        said of it; None: what its own decorator says, if it has one. A completer that it names by itself, and that is
        not there yet, is added under its own name. Raises `UsageError` for
        what is no such function, `UnfitSignature` for a signature that JSON cannot reach, `TypeError` or `ValueError`
        for a promise that means nothing.
        """
        from callyard.functions.described import find_unchecked_patterns
        from callyard.functions.json_schema import BadSchema
        from callyard.functions.signature import Invocable

        own = target if isinstance(target, Function) else None
        plain = target if own is None else own.target
        _check_target(plain)
        if declared is None:
            declared = TOOL if own is None else own.declared
        if declared.role in ("prompt", "resource"):
            from callyard.functions.roles import check_role

            check_role(plain, declared)
        base = NO_PROMISES if declared.role == "tool" else READ_ONLY
        kept = build_promises("add_function", promises, base if own is None else own.promises)
        named = name if name is not None else plain.__name__
        invocable = Invocable(named, plain, kept, declared)
        schema = invocable.input_schema()
        brought = declared.input_schema is not None
        unbounded = [] if brought else list(find_unchecked_patterns(schema))
        if unbounded:
            expected = "expected a pattern for a linear-time engine: Field(pattern=…) with a text, not with re.compile"
            raise BadSchema([(pointer, expected) for pointer in unbounded], named)
        spec = LocalSpec(
            name=FunctionId(named),
            digest=Digest(""),
            entry_selector="",
            signature=invocable.signature_text(),
            description=invocable.description(),
            input_schema=_to_raw(schema),
            output_schema=_to_raw(invocable.output_schema()),
            promises=kept,
            takes_row=invocable.takes_row,
            is_async=invocable.is_async,
            line=invocable.line,
            role=declared.role,
            title=declared.title,
            uri=declared.uri,
            mime_type=declared.mime_type,
            completions=invocable.completions(self._find_name),
            own_schema=brought,
            handler=LocalHandler(plain, kept, invocable=invocable),
            checker=Checker(
                schema=lambda: _compile(spec),
                invocable=None if invocable.runs_user_code else invocable,
            ),
        )
        self.add(spec, override=override)
        self._add_completers(declared)
        return spec

    def _find_name(self, plain: object) -> str | None:
        """Of a function of this process that is here already."""
        found = (spec.name for spec in self._specs.values() if spec.handler and spec.handler.target is plain)
        return next(found, None)

    def _add_named_completers(self, declared: Declared, module: ModuleType) -> None:
        for source in declared.complete.values():
            if isinstance(source, str) and source not in self._specs:
                plain = vars(module).get(source)
                if not inspect.isfunction(plain):
                    raise UsageError(f"{module.__name__}: complete= names {source!r}, and there is no such function")
                self.add_function(plain, name=source, declared=COMPLETER)

    def _add_completers(self, declared: Declared) -> None:
        for source in completers(declared.complete):
            plain = source.target if isinstance(source, Function) else source
            if self._find_name(plain) is None:
                self.add_function(source, declared=None if isinstance(source, Function) else COMPLETER)

    def add_tool(
        self,
        name: str,
        handler: Callable[[dict[str, Any]], Any],
        *,
        description: str = "",
        input_schema: Mapping[str, Any],
        output_schema: Mapping[str, Any] | None = None,
        override: bool = False,
        **promises: Any,
    ) -> FunctionSpec:
        """Add a tool that brings its own JSON Schema. `handler` is called with one dict, the arguments.

        A root that names its `properties` takes no others, unless it says so with `additionalProperties`. Raises
        `BadSchema` for a schema that cannot be used, with the place; `normalize_schema` mends what is almost right.
        """
        from callyard.functions.json_schema import JsonSchema

        if not callable(handler):
            raise UsageError(f"tool {name!r}: expected a function that takes one dict, the arguments, got {handler!r}")
        kept = build_promises("add_tool", promises)
        arguments = JsonSchema(input_schema, subject=f"input schema of {name!r}")
        result = None if output_schema is None else JsonSchema(output_schema, subject=f"output schema of {name!r}")
        local = LocalHandler(handler, kept)
        spec = LocalSpec(
            name=FunctionId(name),
            digest=Digest(""),
            entry_selector="",
            signature=f"{name}(arguments)",
            description=description,
            input_schema=_to_raw(arguments.schema),
            output_schema=_ANYTHING if result is None else _to_raw(result.schema),
            promises=kept,
            is_async=local.is_async,
            handler=local,
            checker=Checker(schema=lambda: arguments),
            result_schema=result,
        )
        self.add(spec, override=override)
        return spec

    def validate(self, name: str, args: bytes | Mapping[str, Any]) -> list[Problem]:
        """What does not fit of the arguments of a call; empty: all does. Runs no code of the user's.

        Raises `UnknownFunction`.
        """
        try:
            self.get(name).check(args)
        except ArgumentsMisfit as misfit:
            return misfit.problems
        return []

    # --- reading ----------------------------------------------------------------------------------------------------

    def get(self, name: str) -> FunctionSpec:
        """Raises `UnknownFunction`, or `UsageError` before the registry is described. Runs no code of the user's."""
        spec = self._specs.get(name)
        if spec is not None:
            return spec
        if self._bundle is None:
            raise UnknownFunction(f"no function {name!r}; {self._suggest(name)}")
        if not self.is_described and not self._specs:
            raise UsageError(
                f"the functions of {self.bundle.name} are not known yet: start a Worker with this registry"
            )
        raise UnknownFunction(f"no function {name!r} in {self.bundle.name}; {self._suggest(name)}")

    def outgoing(self, function: object) -> Outgoing:
        """How this process, which has imported it, calls one of these functions by its object.

        A described function is found by where it is defined, whatever its module is called here. Raises `UsageError`
        for what is none of them, with what to do, and `UnfitSignature`.
        """
        plain = function.target if isinstance(function, Function) else function
        if not inspect.isroutine(plain) and not isinstance(plain, type):
            raise UsageError(explain_no_function(plain))
        found = self._outgoing.get(function)
        if found is None:
            found = self._outgoing[function] = self._make_outgoing(function, plain)
        return found

    def _make_outgoing(self, function: object, plain: Callable[..., Any]) -> Outgoing:
        from callyard.functions.callables import as_function  # and pydantic: not for those who call by name
        from callyard.functions.outgoing import Outgoing
        from callyard.functions.signature import Invocable

        declared = function.declared if isinstance(function, Function) else TOOL
        for spec in self._specs.values():
            if spec.handler is not None and spec.handler.target == plain:
                if spec.handler.invocable is None:
                    raise UsageError(f"tool {spec.name!r} has a schema and no signature: call it by its name")
                return Outgoing(spec.name, spec.handler.invocable, typed=True)
        home = find_home(plain, None if self.target is None else self.target.root, self._bundle)
        found = [spec for spec in self._specs.values() if spec.handler is None and spec.defined == home]
        if len(found) > 1:  # one function under several names, or what a decorator without functools.wraps made
            here = vars(sys.modules.get(plain.__module__, object))
            found = [spec for spec in found if here.get(spec.name) is function] or found
        if not found:
            raise UsageError(explain_stranger(plain, home, self._bundle, self.names()))
        if len(found) > 1:
            names = " and ".join(spec.name for spec in found)
            raise UsageError(
                f"{names} are all defined as {home.partition(':')[2]}, so that the object does not tell which is "
                "meant: call it by its name, or use functools.wraps in its decorator"
            )
        spec = found[0]
        invocable = Invocable(spec.name, as_function(spec.name, plain), spec.promises, declared)
        return Outgoing(spec.name, invocable, typed=True)

    def find_resource(self, uri: str) -> tuple[FunctionSpec, dict[str, str]] | None:
        """The resource at `uri` and the arguments to read it with: one of just that URI, else the first template."""
        found: tuple[FunctionSpec, dict[str, str]] | None = None
        for spec in self._specs.values():
            arguments = spec.match(uri)
            if arguments == {}:
                return spec, {}
            if arguments is not None and found is None:
                found = spec, arguments
        return found

    def names(self) -> list[str]:
        return list(self._specs)

    def specs(self) -> list[FunctionSpec]:
        return list(self._specs.values())

    def described(self) -> list[FunctionSpec]:
        """Those that executors run."""
        return [spec for spec in self._specs.values() if spec.handler is None]

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __iter__(self) -> Iterator[FunctionSpec]:
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)

    def _suggest(self, name: str) -> str:
        reason = explain_absence(self._bundle.source, name) if self._bundle is not None else ""
        if reason:
            return reason
        if not self._specs:
            return "the registry is empty"
        known = [spec.name for spec in self if spec.role == "tool"] or self.names()
        close = difflib.get_close_matches(name, known, n=3)
        if close:
            return f"did you mean {' or '.join(repr(other) for other in close)}?"
        more = f" and {len(known) - 10} more" if len(known) > 10 else ""
        return f"there are: {', '.join(known[:10])}{more}"

    def _to_spec(self, function: DescribedFunction) -> FunctionSpec:
        try:
            promises = _PROMISES.decode(function.promises)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"promises of {function.name!r}: {error}") from error
        if function.role not in _ROLES:
            expected = ", ".join(_ROLES)
            raise ProtocolError(f"role of {function.name!r}: expected one of {expected}, got {function.role!r}")
        try:
            completions = read_completions(function.completions)
            if function.role == "resource":
                parse_uri(function.uri)
        except (msgspec.DecodeError, ValueError) as error:
            raise ProtocolError(f"description of {function.name!r}: {error}") from error
        return FunctionSpec(
            name=function.name,
            digest=self.bundle.digest,
            entry_selector=function.entry_selector,
            signature=function.signature,
            description=function.description,
            input_schema=function.input_schema.copy(),
            output_schema=function.output_schema.copy(),
            promises=promises,
            takes_row=function.takes_row,
            is_async=function.is_async,
            line=function.line,
            role=cast(Role, function.role),
            title=function.title,
            uri=function.uri,
            mime_type=function.mime_type,
            completions=completions,
            own_schema=function.own_schema,
            binary=function.binary,
            defined=function.defined,
        )


def _compile(spec: FunctionSpec) -> JsonSchema | None:
    """The filter of arguments. Texts have none: what they stand for is read by the signature, and cheap to refuse."""
    if spec.role in ("prompt", "resource"):
        return None
    return compile_own(spec.input_schema) if spec.own_schema else compile_described(spec.input_schema)


def _check_target(target: Any) -> None:
    """Raises `UsageError` for what cannot be called with arguments by a signature, once, for a value."""
    plain = inspect.unwrap(target) if callable(target) else target
    if not inspect.isfunction(plain) and not inspect.ismethod(plain):
        raise UsageError(
            f"expected a function or a bound method, got {target!r}: wrap it in a def; for a tool that brings its own"
            " schema use add_tool"
        )
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise UsageError(f"expected a function that returns a value, got the generator {plain.__qualname__}")


def _to_raw(schema: Mapping[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(schema, enc_hook=str))
