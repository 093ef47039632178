"""`@function`: what the author of a function promises about it.

User files import this module, so it imports nothing heavy. A promise is never guessed: every default is the safe one.
Source: ARCHITECTURE decision 1, tool-dispatch D1, D50.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any, Final, Generic, Literal, ParamSpec, TypeVar, get_args, overload

import msgspec

from callyard.policy.rate import Rate
from callyard.policy.retry import RetryPolicy

P = ParamSpec("P")
R = TypeVar("R")

Isolation = Literal["executor", "inline", "thread"]
ISOLATIONS: Final[tuple[str, ...]] = get_args(Isolation)
OnAbandon = Literal["cancel", "finish"]
_ON_ABANDON: Final[tuple[str, ...]] = get_args(OnAbandon)
MILLISECONDS_MAX: Final = 30 * 24 * 3_600_000
"""Thirty days: a longer limit is a slip of the unit."""
RESULT_BYTES_MAX: Final = 8 * 1024 * 1024
"""Most bytes of one encoded result, unless the function says less or more (D26)."""
_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "timeout_ms": (1, MILLISECONDS_MAX),
    "budget_ms": (0, MILLISECONDS_MAX),
    "max_concurrency": (1, 1_000_000),
    "max_result_bytes": (1, 16 * 1024 * 1024),
}
_TAGS_MAX: Final = 32
_POOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Promises(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What holds for every call of a function. None: the layer that runs it uses its own default.

    Raises `TypeError` or `ValueError` when built with a value that means nothing. Decoding checks the same.
    """

    idempotent: bool = False
    """Running it again is safe, so a failed attempt may be retried."""
    pure: bool = False
    """Same input, same output, no effect: results may be cached and shared. Implies `idempotent`."""
    timeout_ms: int | None = None
    """Wall time of one attempt, kept by the dispatcher."""
    budget_ms: int | None = None
    """Running time of one attempt, kept by the executor; queueing does not count. 0: unlimited."""
    isolation: Isolation | None = None
    max_concurrency: int | None = None
    """Most calls of it that run at once."""
    max_result_bytes: int | None = None
    exclusive: bool = False
    """A begun call shares its process with no other begun call."""
    preempt: bool = False
    """A long call may be set aside for others; what they then share is the author's concern."""
    pool: str | None = None
    """The named pool of executors that its calls run in; None: the worker's own."""
    retry: RetryPolicy | None = None
    """How often, and after what waits, the dispatcher tries again what is safe to try again."""
    on_abandon: OnAbandon | None = None
    """What becomes of a keyed run that nobody waits for. None: `cancel` when it is idempotent, else `finish`."""
    rate: str | None = None
    """So many calls in so much time, per tenant: `10/s`, `100/m`. What is over it waits."""
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("idempotent", "pure", "exclusive", "preempt"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number, got {value!r}")
            if not low <= value <= high:
                raise ValueError(f"{name} must be in {low}..{high}, got {value}")
        if self.isolation is not None and self.isolation not in ISOLATIONS:
            raise ValueError(f"isolation must be one of {', '.join(ISOLATIONS)}, got {self.isolation!r}")
        if self.pool is not None:
            check_pool_name(self.pool)
        if self.retry is not None and not isinstance(self.retry, RetryPolicy):
            raise TypeError(f"retry must be a RetryPolicy, got {self.retry!r}")
        if self.on_abandon is not None and self.on_abandon not in _ON_ABANDON:
            raise ValueError(f"on_abandon must be one of {', '.join(_ON_ABANDON)}, got {self.on_abandon!r}")
        if self.rate is not None:
            if not isinstance(self.rate, str):
                raise TypeError(f'rate must be a text such as "10/s", got {self.rate!r}')
            Rate.parse(self.rate)
        tags: Any = self.tags
        if not isinstance(tags, tuple | list) or not all(isinstance(tag, str) and tag for tag in tags):
            raise TypeError(f"tags must be a tuple of texts, got {tags!r}")
        if len(tags) > _TAGS_MAX:
            raise ValueError(f"tags must be at most {_TAGS_MAX}, got {len(tags)}")
        msgspec.structs.force_setattr(self, "tags", tuple(tags))
        if self.pure:  # one place decides it, so that the two promises cannot disagree
            msgspec.structs.force_setattr(self, "idempotent", True)


def check_pool_name(name: object) -> None:
    """Raises `TypeError` or `ValueError` for what names no pool."""
    if not isinstance(name, str):
        raise TypeError(f"pool must be the name of a pool, got {name!r}")
    if not _POOL_NAME.fullmatch(name):
        raise ValueError(f"pool must be 1 to 64 letters, digits, '-' and '_', got {name!r}")


NO_PROMISES: Final = Promises()


class Function(Generic[P, R]):
    """A function with its promises. Calling it runs the plain function, here and now."""

    __wrapped__: Callable[P, R]
    __name__: str
    __qualname__: str

    def __init__(self, target: Callable[P, R], promises: Promises = NO_PROMISES) -> None:
        _check_target(target)
        self.promises = promises
        update_wrapper(self, target)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__wrapped__(*args, **kwargs)

    @property
    def target(self) -> Callable[P, R]:
        """The plain function."""
        return self.__wrapped__

    def __repr__(self) -> str:
        return f"<function {self.__module__}.{self.__qualname__} with {self.promises}>"

    def __reduce__(self) -> str:
        return self.__qualname__  # by reference, as plain functions are


@overload
def function(target: Callable[P, R], /) -> Function[P, R]: ...
@overload
def function(
    *,
    idempotent: bool = ...,
    pure: bool = ...,
    timeout_ms: int | None = ...,
    budget_ms: int | None = ...,
    isolation: Isolation | None = ...,
    max_concurrency: int | None = ...,
    max_result_bytes: int | None = ...,
    exclusive: bool = ...,
    preempt: bool = ...,
    pool: str | None = ...,
    retry: RetryPolicy | None = ...,
    on_abandon: OnAbandon | None = ...,
    rate: str | None = ...,
    tags: tuple[str, ...] = ...,
) -> Callable[[Callable[P, R]], Function[P, R]]: ...
def function(target: Callable[..., Any] | None = None, /, **promises: Any) -> Any:
    """Declare a function callable, bare (`@function`) or with promises (`@function(pure=True)`).

    Raises `TypeError` or `ValueError` where the decorator stands for a target or a promise that cannot be kept.
    """
    if target is not None:
        return Function(target)
    declared = build_promises("@function", promises)
    return lambda plain: Function(plain, declared)


def build_promises(who: str, promises: Mapping[str, Any], base: Promises = NO_PROMISES) -> Promises:
    """`base` with `promises` in place of its own. Raises `TypeError` or `ValueError`; `who` names the taker of them."""
    unknown = promises.keys() - set(Promises.__struct_fields__)
    if unknown:
        known = ", ".join(Promises.__struct_fields__)
        raise TypeError(f"{who} does not know {', '.join(sorted(unknown))}; it knows {known}")
    return msgspec.structs.replace(base, **promises) if promises else base


def _check_target(target: object) -> None:
    plain = inspect.unwrap(target) if callable(target) else target  # below functools.cache and the like
    if not isinstance(plain, types.FunctionType) or isinstance(target, Function):
        raise TypeError(f"@function takes a plain function, written with def or async def, got {target!r}")
    where = f"{plain.__module__}.{plain.__qualname__}"
    if "." in plain.__qualname__.rpartition("<locals>.")[2]:
        raise TypeError(f"@function takes functions at the top of a module, not methods: {where}")
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise TypeError(f"@function takes functions that return a value, not generators: {where}")
