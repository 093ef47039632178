"""The one bundle that this process serves: loaded once, under the digest it is bound to.

`callyard.functions` (and with it pydantic) is imported after the first heartbeat, so that it delays no start (X60).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from callyard.errors import ErrorKind, Outcome, UsageError
from callyard.executor import failures
from callyard.executor.failures import Fault
from callyard.functions.function import Function
from callyard.ids import Digest
from callyard.wire.messages import DescribedFunction, WireError

if TYPE_CHECKING:
    from callyard.functions.loading import LoadedBundle
    from callyard.functions.outgoing import Outgoing
    from callyard.functions.signature import Invocable


class NotUsable(Exception):
    """The bundle, or one function of it, cannot be used: every call of it fails so, without having run."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault
        fault.outcome = Outcome.NOT_RUN


class Code:
    def __init__(self, digest: Digest, path: str, module: str, *, with_locals: bool) -> None:
        """Load `module` from the folder `path`. Never raises: a bundle that cannot be loaded has an `error`."""
        self.digest = digest
        self.path = path
        self.error: WireError | None = None
        self._with_locals = with_locals
        self._bundle: LoadedBundle | None = None
        self._module = module
        self._invocables: dict[str, Invocable] = {}
        self.sliced: set[str] = set()
        """Selectors of the functions found so far that have the promise `preempt`."""
        self._outgoing: dict[str | int, Outgoing] = {}
        """By name, or by `id()` of a plain function of the bundle, which lives as long as it."""
        self._load(path, module)

    @property
    def has_async(self) -> bool:
        return self._bundle is not None and self._bundle.has_async

    def _load(self, path: str, module: str) -> None:
        from callyard.functions import loading, signature

        self._load_failure = loading.LoadFailure
        self._arguments_misfit = signature.ArgumentsMisfit
        self._result_misfit = signature.ResultMisfit
        sys.argv[:] = [f"{module.rpartition('.')[2]}.py"]  # as when the file runs by itself: no words of ours
        try:
            self._bundle = loading.load_bundle(path, module)
        except loading.LoadFailure as failure:
            self.error = failure.error
        except BaseException as error:  # noqa: BLE001 - sys.exit at import and the like; contained (X57)
            fault = self.describe(error)
            self.error = WireError(fault.kind, fault.message, details={"stack": fault.stack})

    def describe_bundle(self, names: Sequence[str] = ()) -> tuple[list[DescribedFunction], list[str]]:
        """Functions, `names` among them, and installed packages. Raises `NotUsable`."""
        if self._bundle is None:
            raise NotUsable(self._load_fault())
        try:
            return self._bundle.describe(names)
        except self._load_failure as failure:
            raise NotUsable(failures.fault_of(failure.error)) from failure
        except Exception as error:
            raise NotUsable(self.describe(error)) from error

    def find(self, entry_selector: str) -> Invocable:
        """The function behind a selector. Raises `NotUsable`."""
        found = self._invocables.get(entry_selector)
        if found is not None:
            return found
        if self._bundle is None:
            raise NotUsable(self._load_fault())
        try:
            found = self._bundle.get(entry_selector)
        except self._load_failure as failure:
            raise NotUsable(failures.fault_of(failure.error)) from failure
        except Exception as error:
            raise NotUsable(self.describe(error)) from error
        self._invocables[entry_selector] = found
        declared = self._declared(entry_selector)
        if declared is not None and declared.promises.preempt:
            self.sliced.add(entry_selector)
        return found

    def is_exclusive(self, entry_selector: str) -> bool:
        """Whether a function that was found has the promise `exclusive`."""
        declared = self._declared(entry_selector)
        return declared is not None and declared.promises.exclusive

    def _declared(self, entry_selector: str) -> Function[..., object] | None:
        assert self._bundle is not None
        declared = getattr(self._bundle.module, entry_selector.rpartition(":")[2], None)
        return declared if isinstance(declared, Function) else None

    def outgoing(self, function: object) -> Outgoing:
        """How user code calls `function`: a function of the bundle, or a name.

        Raises `UsageError` for a function that is not the bundle's to call, `NotUsable` for one that JSON cannot reach.
        """
        bundle = self._bundle
        assert bundle is not None, "user code runs, so it was loaded"
        plain = function.target if isinstance(function, Function) else function
        key = plain if isinstance(plain, str) else id(plain)
        found = self._outgoing.get(key)
        return found if found is not None else self._make_outgoing(key, function, bundle)

    def _make_outgoing(self, key: str | int, function: object, bundle: LoadedBundle) -> Outgoing:
        from callyard.functions.outgoing import Outgoing, describe_stranger

        name = function if isinstance(function, str) else bundle.find_name(function)
        if name is None:
            raise UsageError(describe_stranger(function, self._module, bundle.names()))
        if name not in bundle.names():  # the worker's to refuse: its view of the bundle is the one that counts (X84)
            return Outgoing(name, None, typed=False)
        invocable = self.find(f"{self._module}:{name}")
        found = self._outgoing[key] = Outgoing(name, invocable, typed=not isinstance(function, str))
        return found

    def _load_fault(self) -> Fault:
        assert self.error is not None
        return failures.fault_of(self.error)

    # --- what went wrong in a call --------------------------------------------------------------------------------

    def describe(self, error: BaseException, *, function: str = "", idempotent: bool = False) -> Fault:
        """What an exception of the user's says; one that cannot be looked at is told by its type alone (X57)."""
        try:
            return failures.describe(
                error, root=self.path, with_locals=self._with_locals, function=function, idempotent=idempotent
            )
        except BaseException as second:  # noqa: BLE001 - `__class__`, `__getattribute__` and the like are user code
            return failures.describe_unreadable(error, second)

    def describe_misfit(self, error: BaseException) -> Fault:
        """From binding the arguments: a misfit, or whatever a validator of the user's raised."""
        # By type(): isinstance asks an exception's own `__class__`, which is user code.
        if issubclass(type(error), self._arguments_misfit):
            assert isinstance(error, self._arguments_misfit)
            return Fault(ErrorKind.SCHEMA, error.message, Outcome.NOT_RUN, dict(error.details))
        fault = self.describe(error)
        fault.outcome = Outcome.NOT_RUN
        if issubclass(type(error), Exception) and fault.kind is ErrorKind.INTERNAL:
            fault.message = f"Callyard could not read the arguments: {fault.message}"  # the user's raise a misfit
        return fault

    def describe_result(self, error: BaseException) -> Fault:
        """From encoding the result: it ran, but its result cannot be sent."""
        if issubclass(type(error), self._result_misfit):
            assert isinstance(error, self._result_misfit)
            return Fault(ErrorKind.RESULT, error.message, details=dict(error.details))
        if issubclass(type(error), RecursionError):
            return Fault(ErrorKind.RESULT, "the result is nested too deeply, or contains itself")
        fault = self.describe(error)
        if fault.kind is not ErrorKind.RESOURCE_LIMIT:
            fault.kind = ErrorKind.RESULT
        return fault
