"""The functions that can be called, by name, as an executor described them.

The worker's process never imports user code (D6): a registry for a target holds its bundle, and its functions once a
worker had it described. Source: tool-dispatch D1, D6.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Self

import msgspec

from callyard.errors import ProtocolError, UsageError
from callyard.functions.bundle import Bundle
from callyard.functions.function import Promises
from callyard.functions.imports import explain_absence
from callyard.ids import Digest, FunctionId
from callyard.wire.messages import DescribedFunction, DescribedPayload

FUNCTIONS_MAX: Final = 10_000
"""Most functions of one registry."""
_PROMISES: Final = msgspec.json.Decoder(Promises)


class FunctionSpec(msgspec.Struct, frozen=True):
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


class UnknownFunction(UsageError, KeyError):
    """No function of that name; the message names those that are close."""

    def __str__(self) -> str:  # KeyError would show the message as a repr
        return str(self.args[0])


class Registry:
    """Functions of one bundle by name, in the order they were added."""

    def __init__(
        self, bundle: Bundle, *, path: str | os.PathLike[str] | None = None, include: Iterable[str] = ()
    ) -> None:
        """`path` and `include`: where the bundle was collected from, so that it can be read again."""
        self.bundle = bundle
        self.path = None if path is None else Path(path).absolute()
        self.include = tuple(include)
        self.installed_packages: tuple[str, ...] = ()
        """Distributions outside the bundle that it imports."""
        self.is_described = False
        self._specs: dict[str, FunctionSpec] = {}

    @classmethod
    def for_target(cls, path: str | os.PathLike[str], *, include: Iterable[str] = ()) -> Self:
        """The registry of a Python file, whose functions are known once a worker had it described.

        Raises `UsageError` for a file that cannot be a target.
        """
        include = tuple(include)
        return cls(Bundle.collect(path, include), path=path, include=include)

    def read_again(self) -> Registry:
        """What the files hold now, not described. Reads files: not for an event loop. Raises `UsageError`."""
        if self.path is None:
            raise UsageError(f"this registry did not read {self.bundle.name} from a file: there is nothing to reload")
        return Registry.for_target(self.path, include=self.include)

    def become(self, other: Registry) -> None:
        """Take the place of this registry's bundle and functions, in one step: everybody who holds it sees them."""
        self.bundle = other.bundle
        self.installed_packages = other.installed_packages
        self.is_described = other.is_described
        self._specs = dict(other._specs)

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
            error = UsageError(described.error.message)
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

    def add(self, spec: FunctionSpec, *, override: bool = False) -> None:
        """Raises `UsageError` for a name that is there, unless `override` puts `spec` in its place."""
        if not override and spec.name in self._specs:
            raise UsageError(f"there is a function {spec.name!r} already: pass override=True to replace it")
        self._specs[spec.name] = spec

    def get(self, name: str) -> FunctionSpec:
        """Raises `UnknownFunction`, or `UsageError` before the registry is described."""
        spec = self._specs.get(name)
        if spec is not None:
            return spec
        if not self.is_described and not self._specs:
            raise UsageError(
                f"the functions of {self.bundle.name} are not known yet: start a Worker with this registry"
            )
        raise UnknownFunction(f"no function {name!r} in {self.bundle.name}; {self._suggest(name)}")

    def names(self) -> list[str]:
        return list(self._specs)

    def specs(self) -> list[FunctionSpec]:
        return list(self._specs.values())

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __iter__(self) -> Iterator[FunctionSpec]:
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)

    def _suggest(self, name: str) -> str:
        reason = explain_absence(self.bundle.source, name)
        if reason:
            return reason
        close = difflib.get_close_matches(name, self._specs, n=3)
        if close:
            return f"did you mean {' or '.join(repr(other) for other in close)}?"
        known = list(self._specs)
        more = f" and {len(known) - 10} more" if len(known) > 10 else ""
        return f"there are: {', '.join(known[:10])}{more}"

    def _to_spec(self, function: DescribedFunction) -> FunctionSpec:
        try:
            promises = _PROMISES.decode(function.promises)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"promises of {function.name!r}: {error}") from error
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
        )
