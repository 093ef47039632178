"""What a policy is, and how one is named: `allow`, `ast`, a callable, an external command.

A policy is asked in a thread of its own, unless its callable is a coroutine function; it answers with a `Verdict`.
Whatever else it does (raises, returns something else, takes too long) is no verdict, and never an acceptance.
Source: call-execution X41.
"""

from __future__ import annotations

import hashlib
import inspect
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Final, Protocol

import msgspec

from callyard.errors import UsageError
from callyard.functions.audit.command import run_command
from callyard.functions.audit.rules import DEFAULT_DENIED, Rules
from callyard.functions.audit.syntax import review
from callyard.functions.audit.verdict import NoVerdict, Verdict
from callyard.functions.bundle import Bundle
from callyard.ids import Digest

POLICY_ID_CHARACTERS_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleView:
    """What a policy gets to see of a bundle."""

    digest: Digest
    target: str
    """The target's path inside the bundle, such as `tools.py`."""
    files: Mapping[str, bytes]
    """Every file by its path relative to the bundle's root, POSIX style."""
    folder: Path
    """Where the same files lie, read-only."""

    @classmethod
    def of(cls, bundle: Bundle, folder: Path) -> BundleView:
        path = bundle.module.replace(".", "/")
        target = next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in bundle.files), bundle.name)
        return cls(digest=bundle.digest, target=target, files=bundle.files, folder=folder)


class Policy(Protocol):
    """Judges bundles. The same policy gives the same bytes the same verdict: it is asked once."""

    @property
    def policy_id(self) -> str:
        """Printable, and another one for other rules: verdicts are told apart by it."""
        ...

    @property
    def heeds_stop(self) -> bool:
        """Whether `judge` returns soon after `stop` is set, so that its end can be waited for."""
        ...

    def judge(self, bundle: BundleView, stop: Event) -> Verdict | Awaitable[Verdict]:
        """Called outside the event loop, unless `is_async`. Raises whatever it likes: that is no verdict."""
        ...

    @property
    def is_async(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class AllowPolicy:
    """Accepts everything; for a log of what ran."""

    policy_id: str = "allow"
    heeds_stop: bool = True
    is_async: bool = False

    def judge(self, bundle: BundleView, stop: Event) -> Verdict:
        return Verdict(accepted=True)


class AstPolicy:
    """Refuses denied imports and uses, read from the syntax trees. An aid to review, and no sandbox.

    `deny` and `allow` are rules as `Rules` reads them; the longest that fits a name decides. `native` lets compiled
    files pass, which cannot be read. Raises UsageError for what is no rule.
    """

    heeds_stop = True
    is_async = False

    def __init__(
        self, *, deny: Iterable[str] = DEFAULT_DENIED, allow: Iterable[str] = (), native: bool = False
    ) -> None:
        self._rules = Rules(deny, allow)
        self._native = native
        self.policy_id = f"ast:{self._rules.fingerprint}{'+native' if native else ''}"

    def judge(self, bundle: BundleView, stop: Event) -> Verdict:
        reasons = review(bundle.files, self._rules, native=self._native, stop=stop)
        return Verdict(accepted=not reasons, reasons=tuple(reasons))


class CallablePolicy:
    """A function of the user's: takes a `BundleView`, returns a `Verdict` or a bool; may be `async def`."""

    heeds_stop = False

    def __init__(self, judge: Callable[[BundleView], Any], policy_id: str | None = None) -> None:
        self._judge = judge
        self.is_async = inspect.iscoroutinefunction(judge) or inspect.iscoroutinefunction(
            getattr(judge, "__call__", None)  # noqa: B004 - an object whose call is async
        )
        own = getattr(judge, "__qualname__", type(judge).__qualname__)
        self.policy_id = policy_id or f"callable:{getattr(judge, '__module__', '?')}.{own}"

    def judge(self, bundle: BundleView, stop: Event) -> Verdict | Awaitable[Verdict]:
        if self.is_async:
            return self._judge_async(bundle)
        answer = self._judge(bundle)
        if inspect.iscoroutine(answer):
            answer.close()
            raise NoVerdict("it returned a coroutine: declare it with async def")
        return read_answer(answer)

    async def _judge_async(self, bundle: BundleView) -> Verdict:
        return read_answer(await self._judge(bundle))


class CommandPolicy:
    """An external program: `argv` and the bundle's folder behind it. See `command.run_command` for its answer."""

    heeds_stop = True
    is_async = False

    def __init__(self, argv: Sequence[str | Path]) -> None:
        if isinstance(argv, str) or not argv or not all(str(word) for word in argv):
            raise UsageError(
                f"an audit command must be a list of words, such as ['./review.sh', '--all'], got {argv!r}"
            )
        self.argv = tuple(map(str, argv))
        self.policy_id = f"cmd:{shlex.join(self.argv)}"[:POLICY_ID_CHARACTERS_MAX]

    def judge(self, bundle: BundleView, stop: Event) -> Verdict:
        return run_command([*self.argv, str(bundle.folder)], stop)


def read_answer(answer: object) -> Verdict:
    """A callable's answer. Raises NoVerdict: what was forgotten to be returned is no acceptance."""
    if isinstance(answer, Verdict):
        return answer
    if isinstance(answer, bool):
        return Verdict(accepted=answer, reasons=() if answer else ("it returned False",))
    raise NoVerdict(f"expected a Verdict or a bool, got {answer!r:.200}")


def to_policy(audit: object) -> Policy | None:
    """The policy behind what a user gave as `audit=`. None: no policy. Raises UsageError."""
    if audit is None:
        return None
    if isinstance(audit, str):
        return parse_policy(audit)
    if isinstance(audit, AllowPolicy | AstPolicy | CallablePolicy | CommandPolicy):
        return audit
    if isinstance(audit, list | tuple):
        return CommandPolicy(audit)
    if callable(audit):
        return CallablePolicy(audit)
    raise UsageError(
        f"audit must be 'allow', 'ast', 'cmd: …', a policy, a callable or a command as a list, got {audit!r:.200}"
    )


def parse_policy(text: str) -> Policy:
    """A policy in words: `allow`, `ast`, `ast: deny=a,b allow=c native`, `cmd: PROGRAM ARGUMENTS`. Raises UsageError.

    In words `deny` adds to what is denied by default.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind == "allow" and not colon:
        return AllowPolicy()
    if kind == "ast":
        return _parse_ast(rest)
    if kind == "cmd":
        try:
            return CommandPolicy(shlex.split(rest))
        except ValueError as error:  # an open quote
            raise UsageError(f"audit command {rest.strip()!r}: {error}") from error
    raise UsageError(
        f"unknown audit policy {text!r}: expected allow, ast, 'ast: deny=NAMES allow=NAMES native' or 'cmd: PROGRAM'"
    )


def _parse_ast(words: str) -> AstPolicy:
    given: dict[str, list[str]] = {"deny": [], "allow": []}
    native = False
    for word in words.split():
        key, equals, names = word.partition("=")
        if word == "native":
            native = True
        elif equals and key in given:
            given[key] += [name for name in names.split(",") if name]
        else:
            raise UsageError(f"audit policy ast: expected deny=NAMES, allow=NAMES or native, got {word!r}")
    return AstPolicy(deny=(*DEFAULT_DENIED, *given["deny"]), allow=given["allow"], native=native)


def audit_id_of(policy: Policy, digest: Digest) -> str:
    """The id of a policy's verdict on a digest: in the log, and in each ExecuteCall that it let through."""
    parts = msgspec.json.encode([policy.policy_id, digest])
    return f"audit-{hashlib.blake2b(parts, digest_size=8).hexdigest()}"
