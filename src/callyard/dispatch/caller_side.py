"""What a gate gives with a call beside its arguments: whom to tell, whom to ask, and what is known of the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import msgspec

from callyard.dispatch.call import Call, LogCallback
from callyard.dispatch.client import Client
from callyard.dispatch.options import check_texts
from callyard.errors import UsageError
from callyard.functions.encoding import ResultMisfit, encode_value
from callyard.functions.ports import EMPTY, AskCallback


class CallerSide(TypedDict, total=False):
    """Options of `Dispatcher.dispatch`; in a mapping of their own, a call that has none pays for none."""

    on_begin: Callable[[], None] | None
    on_log: LogCallback | None
    on_ask: AskCallback | None
    claims: Mapping[str, str] | None
    headers: Mapping[str, str] | None
    meta: Mapping[str, Any] | None


class Checked(msgspec.Struct, frozen=True):
    """The same, checked."""

    on_begin: Callable[[], None] | None
    on_log: LogCallback | None
    on_ask: AskCallback | None
    claims: Mapping[str, str]
    headers: Mapping[str, str]
    meta: msgspec.Raw

    def give_to(self, call: Call, ask_timeout_ms: int) -> None:
        """What is not given stays as it is: a nested call has it from the one above."""
        call.on_begin = self.on_begin
        if self.on_log is not None:
            call.on_log = self.on_log
        if self.on_ask is not None:
            call.client = Client(self.on_ask, ask_timeout_ms)
        if self.claims:
            call.claims = self.claims
        if self.headers:
            call.headers = self.headers
        if self.meta is not EMPTY:
            call.meta = self.meta


def check_side(
    on_begin: Callable[[], None] | None = None,
    on_log: LogCallback | None = None,
    on_ask: AskCallback | None = None,
    claims: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    meta: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Checked:
    """Raises UsageError, and TypeError for an option that there is not."""
    if unknown:
        from callyard.dispatch.dispatching import DispatchOptions

        known = ", ".join(DispatchOptions.__annotations__)
        raise TypeError(f"dispatch() has no option {next(iter(unknown))!r}; it has {known}")
    encoded = EMPTY
    if meta is not None:
        try:
            if not isinstance(meta, Mapping):
                raise UsageError(f"meta must be a JSON object, got {type(meta).__name__}")
            encoded = msgspec.Raw(encode_value(dict(meta)))
        except ResultMisfit as misfit:
            raise UsageError(f"meta must be a JSON object: {misfit}") from misfit
    said = {} if claims is None else check_texts("claims", claims)
    return Checked(on_begin, on_log, on_ask, said, {} if headers is None else check_texts("headers", headers), encoded)
