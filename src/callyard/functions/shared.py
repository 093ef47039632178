"""`Shared`: a value that the worker keeps for many calls, as its caller holds it.

Where a Shared stands in arguments, they say only where the value lies (`packing`). Source: call-execution X95.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Final, Generic, TypeVar, cast, final

import msgspec

T = TypeVar("T")


class SharedPlace(msgspec.Struct, gc=False):
    """Where a shared value lies. One object for its handle and for the memory that it is in."""

    number: int
    """Of this value alone, among all of the process."""
    offset: int
    length: int
    closed: bool = False
    """No further call may name it."""


@final
class Shared(Generic[T]):
    """What `Worker.shared` gives, to be passed to that worker's calls in the place of the value.

    It is closed by `close`, at the end of a `with`, or when nobody holds it any more; its memory is given back once no
    call that was given it is left. `with` gives it typed as the value, so that it fits the parameter of a typed call.
    """

    __slots__ = ("__weakref__", "_let_go", "place")
    __callyard_advice__ = "only calls and maps of its worker take it, at the place of the value"

    def __init__(self, place: SharedPlace, let_go: Callable[[SharedPlace], object]) -> None:
        """`let_go` is called once, on whatever thread closes or collects this."""
        self.place: Final = place
        self._let_go = weakref.finalize(self, let_go, place)
        self._let_go.atexit = False

    def close(self) -> None:
        """Let go of the value: calls that were given it still get it, further ones are refused. Idempotent."""
        self.place.closed = True
        self._let_go()

    def __enter__(self) -> T:
        return cast(T, self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.place.closed else f"{self.place.length:,} bytes"
        return f"<Shared {self.place.number}: {state}>"
