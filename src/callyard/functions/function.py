"""`@function`: what the author of a function promises about it, and what it is for.

User files import this module, so it imports nothing heavy. A promise is never guessed: every default is the safe one.
`@prompt` and `@resource` are in `roles`. Source: ARCHITECTURE decision 1, tool-dispatch D1, D34, D50, D56.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any, Final, Generic, Literal, ParamSpec, TypedDict, TypeVar, Unpack, get_args, overload

import msgspec

from callyard.policy.rate import Rate
from callyard.policy.retry import RetryPolicy

P = ParamSpec("P")
R = TypeVar("R")

Isolation = Literal["executor", "inline", "thread"]
ISOLATIONS: Final[tuple[str, ...]] = get_args(Isolation)
OnAbandon = Literal["cancel", "finish"]
OnDisconnect = Literal["stop", "finish"]
Nan = Literal["refuse", "null"]
"""What NaN and infinities in a result, or in arguments, become: a failure, or null."""
NANS: Final[tuple[str, ...]] = get_args(Nan)
Role = Literal["tool", "prompt", "resource", "completer"]
"""What a function is for. A completer is what a `complete=` names and no role of its own: it suggests values."""
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
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "isolation": ISOLATIONS,
    "on_abandon": get_args(OnAbandon),
    "on_disconnect": get_args(OnDisconnect),
    "nan": NANS,
}
_SWITCHES: Final = ("idempotent", "pure", "read_only", "exclusive", "preempt")
_TAGS_MAX: Final = 32
_POOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Promises(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What holds for every call of a function. None: the layer that runs it uses its own default.

    Raises `TypeError` or `ValueError` when built with a value that means nothing. Decoding checks the same.
    """

    idempotent: bool = False
    """Running it again is safe, so a failed attempt may be retried."""
    pure: bool = False
    """Same input, same output, no effect: results may be cached and shared. Implies `read_only`."""
    read_only: bool = False
    """It changes nothing outside of itself. Implies `idempotent`."""
    destructive: bool | None = None
    """Whether it deletes or overwrites something; None: not said, which callers take for the worst."""
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
    on_disconnect: OnDisconnect | None = None
    """What becomes of a begun call whose caller's connection is lost. None: `stop` when it is idempotent, else `finish`
    (D56)."""
    nan: Nan = "refuse"
    """NaN and infinities in a result: a failure (kind `result`), or null. Arrays and tables keep theirs (D26)."""
    rate: str | None = None
    """So many calls in so much time, per tenant: `10/s`, `100/m`. What is over it waits."""
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _SWITCHES:
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
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if self.destructive is not None and not isinstance(self.destructive, bool):
            raise TypeError(f"destructive must be True, False or None, got {self.destructive!r}")
        if self.destructive and (self.pure or self.read_only):
            raise ValueError(f"{'pure' if self.pure else 'read_only'} and destructive exclude each other")
        if self.pool is not None:
            check_pool_name(self.pool)
        if self.retry is not None and not isinstance(self.retry, RetryPolicy):
            raise TypeError(f"retry must be a RetryPolicy, got {self.retry!r}")
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
        if self.pure:  # one place decides it, so that the promises cannot disagree
            msgspec.structs.force_setattr(self, "read_only", True)
        if self.read_only:
            msgspec.structs.force_setattr(self, "idempotent", True)


def check_pool_name(name: object) -> None:
    """Raises `TypeError` or `ValueError` for what names no pool."""
    if not isinstance(name, str):
        raise TypeError(f"pool must be the name of a pool, got {name!r}")
    if not _POOL_NAME.fullmatch(name):
        raise ValueError(f"pool must be 1 to 64 letters, digits, '-' and '_', got {name!r}")


NO_PROMISES: Final = Promises()


class PromiseArguments(TypedDict, total=False):
    """The fields of `Promises`, for decorators that take them by name."""

    idempotent: bool
    pure: bool
    read_only: bool
    destructive: bool | None
    timeout_ms: int | None
    budget_ms: int | None
    isolation: Isolation | None
    max_concurrency: int | None
    max_result_bytes: int | None
    exclusive: bool
    preempt: bool
    pool: str | None
    retry: RetryPolicy | None
    on_abandon: OnAbandon | None
    on_disconnect: OnDisconnect | None
    nan: Nan
    rate: str | None
    tags: tuple[str, ...]


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """What a decorator says of a function besides its promises. Empty: the signature and the docstring say it."""

    role: Role = "tool"
    title: str = ""
    """For people: `Search flights`."""
    description: str = ""
    uri: str = ""
    """Of a resource; with `{name}` in it, it is a template."""
    mime_type: str = ""
    complete: Mapping[str, Any] = {}
    """Suggestions for arguments, by parameter: texts, a function of `(value: str)`, or the name of one."""
    input_schema: Mapping[str, Any] | None = None
    """The author's own; None: that of the signature."""

    def __post_init__(self) -> None:
        for name in ("title", "description", "uri", "mime_type"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a text, got {getattr(self, name)!r}")


TOOL: Final = Declared()
COMPLETER: Final = Declared(role="completer")
READ_ONLY: Final = Promises(read_only=True)
"""Of what is there to be read, unless it says otherwise: prompts, resources, completers."""


class Function(Generic[P, R]):
    """A function with its promises. Calling it runs the plain function, here and now."""

    __wrapped__: Callable[P, R]
    __name__: str
    __qualname__: str

    def __init__(
        self,
        target: Callable[P, R],
        promises: Promises = NO_PROMISES,
        declared: Declared = TOOL,
        who: str = "@function",
    ) -> None:
        check_target(target, who)
        self.promises = promises
        self.declared = declared
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
    title: str = ...,
    description: str = ...,
    input_schema: Mapping[str, Any] | None = ...,
    **promises: Unpack[PromiseArguments],
) -> Callable[[Callable[P, R]], Function[P, R]]: ...
def function(
    target: Callable[..., Any] | None = None,
    /,
    *,
    title: str = "",
    description: str = "",
    input_schema: Mapping[str, Any] | None = None,
    **promises: Any,
) -> Any:
    """Declare a function callable, bare (`@function`) or with promises (`@function(pure=True)`).

    `description`: in place of the docstring's. `input_schema`: JSON Schema of the arguments, shown as it stands and
    checked before the signature. Raises `TypeError` or `ValueError` where the decorator stands for a target or a
    promise that cannot be kept.
    """
    if target is not None:
        return Function(target)
    kept = build_promises("@function", promises)
    declared = Declared(title=title, description=description, input_schema=input_schema)
    return lambda plain: Function(plain, kept, declared)


def build_promises(who: str, promises: Mapping[str, Any], base: Promises = NO_PROMISES) -> Promises:
    """`base` with `promises` in place of its own. Raises `TypeError` or `ValueError`; `who` names the taker of them."""
    unknown = promises.keys() - set(Promises.__struct_fields__)
    if unknown:
        known = ", ".join(Promises.__struct_fields__)
        raise TypeError(f"{who} does not know {', '.join(sorted(unknown))}; it knows {known}")
    return msgspec.structs.replace(base, **promises) if promises else base


def check_target(target: object, who: str) -> None:
    """Raises `TypeError` for what the decorator `who` cannot stand on."""
    plain = inspect.unwrap(target) if callable(target) else target  # below functools.cache and the like
    if not isinstance(plain, types.FunctionType) or isinstance(target, Function):
        raise TypeError(f"{who} takes a plain function, written with def or async def, got {target!r}")
    where = f"{plain.__module__}.{plain.__qualname__}"
    if "." in plain.__qualname__.rpartition("<locals>.")[2]:
        raise TypeError(f"{who} takes functions at the top of a module, not methods: {where}")
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise TypeError(f"{who} takes functions that return a value, not generators: {where}")
