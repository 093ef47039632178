"""Bearer tokens: what a caller shows, what the config keeps of it, and who it is by it.

A token is 256 random bits, so it cannot be guessed and needs no slow hash: trying 2^256 of them is out of reach however
cheap a try is, where a password would fall to a word list. The config keeps its SHA-256 alone: who reads the file
cannot call. The digest is looked up in a table; how far two digests agree tells nothing about a token that has one, and
the last word is a comparison in constant time. Source: tool-dispatch D36, D44, D47, D58.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from callyard.dispatch.options import check_name
from callyard.errors import UsageError
from callyard.ids import Tenant
from callyard.policy.rate import Rate
from callyard.serve.gateway import Caller
from callyard.settings import Misfit, show_toml, suggest

PREFIX: Final = "cy_"
"""What a token begins with, so that a scanner for secrets knows one when it sees it."""
TOKEN_CHARS_MAX: Final = 256
GLOBS_MAX: Final = 100
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
_FIELDS: Final = ("hash", "tenant", "tools", "owner", "rate", "running_max", "claims")


class HashedToken(msgspec.Struct, frozen=True):
    """A token as the config keeps it."""

    digest: bytes
    caller: Caller


class Tokens:
    """Who calls, by the token that was shown. Without any token in the config everybody is `anonymous`; once there was
    one, nobody ever is: a file that was emptied, or cut short, lets nobody in."""

    def __init__(self, tokens: Iterable[HashedToken] = ()) -> None:
        self.are_asked_for = False
        self.replace(tokens)
        self.anonymous = Caller()
        """Who shows none, where none is asked for."""

    def replace(self, tokens: Iterable[HashedToken]) -> None:
        """From now on these are let in, and no others."""
        self._by_digest = {token.digest: token for token in tokens}
        self.are_asked_for = self.are_asked_for or bool(self._by_digest)

    def find(self, text: str) -> Caller | None:
        """None: nobody's token."""
        if len(text) > TOKEN_CHARS_MAX:
            return None
        digest = hash_token(text)
        found = self._by_digest.get(digest)
        if found is None or not secrets.compare_digest(found.digest, digest):
            return None
        return found.caller

    def find_bearer(self, authorization: str | None) -> Caller | None:
        """By the value of the header Authorization; None: not allowed in. Where no token is asked for, none is read."""
        if not self.are_asked_for:
            return self.anonymous
        scheme, _, text = (authorization or "").strip().partition(" ")
        return self.find(text.strip()) if scheme.lower() == "bearer" else None


def new_token() -> str:
    """256 random bits as text."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_token(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def read_token(name: str, table: Mapping[str, Any]) -> HashedToken:
    """Of a table `[serve.tokens.NAME]`. Raises UsageError."""
    where = f"serve.tokens.{name}"
    check_token_name(name)
    for key in table:
        if key not in _FIELDS:
            raise Misfit((key,), f"no setting '{where}.{key}'; {suggest(key, _FIELDS)}")
    hashed = _HASH.fullmatch(str(table.get("hash", "")))
    if hashed is None:
        raise Misfit(
            ("hash",), f"{where}.hash: expected sha256: and 64 hexadecimal digits, as `callyard token new` says"
        )
    tools = table.get("tools", ["*"])
    if isinstance(tools, str) or not isinstance(tools, list | tuple):
        raise Misfit(("tools",), f"{where}.tools: expected a list of names and patterns, got {tools!r}")
    caller = build_caller(
        where,
        name=name,
        tenant=table.get("tenant"),
        tools=tools,
        owner=table.get("owner", ""),
        rate=table.get("rate", ""),
        running_max=table.get("running_max"),
        claims=table.get("claims", {}),
    )
    return HashedToken(bytes.fromhex(hashed[1]), caller)


def build_caller(
    where: str,
    *,
    name: str,
    tenant: Any,
    tools: Iterable[Any],
    owner: Any = "",
    rate: Any = "",
    running_max: Any = None,
    claims: Any = None,
) -> Caller:
    """Raises UsageError; `where` is put before what is wrong."""
    if tenant is None:
        raise Misfit(("tenant",), f"{where}.tenant is missing: whose calls are these?")
    for field, value in (("tenant", tenant), *((("owner", owner),) if owner != "" else ())):
        try:
            check_name(field, value)
        except UsageError as error:
            raise Misfit((field,), f"{where}: {error}") from None
    globs = tuple(tools)
    if not globs or len(globs) > GLOBS_MAX:
        raise Misfit(("tools",), f"{where}.tools: expected 1 to {GLOBS_MAX} names or patterns, got {len(globs)}")
    for glob in globs:
        if not isinstance(glob, str) or not 1 <= len(glob) <= 256:
            raise Misfit(("tools",), f"{where}.tools: expected names and patterns such as 'read_*', got {glob!r}")
        re.compile(fnmatch.translate(glob))
    if rate != "":
        try:
            Rate.parse(rate)
        except ValueError as error:
            raise Misfit(("rate",), f"{where}.rate: {error}") from None
    if running_max is not None and (type(running_max) is not int or not 1 <= running_max <= 1 << 20):
        raise Misfit(("running_max",), f"{where}.running_max: expected a whole number from 1, got {running_max!r}")
    if not isinstance(claims or {}, Mapping):
        raise Misfit(("claims",), f"{where}.claims: expected a table, got {claims!r}")
    return Caller(
        tenant=Tenant(tenant),
        token=name,
        tools=globs,
        owner=owner,
        rate=rate,
        running_max=running_max,
        claims=dict(claims or {}),
    )


def check_token_name(name: str) -> None:
    """Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"the name of a token is 1 to 64 letters, digits, _ and -, got {name!r}")


def show_table(token: str, caller: Caller) -> str:
    """The TOML table that lets this token in; the token itself is not in it."""
    return "".join(f"{line}\n" for line in table_lines(f"sha256:{hash_token(token).hex()}", caller))


def table_lines(hashed: str, caller: Caller) -> list[str]:
    """Of such a table. `hashed`: what stands for the token in it."""
    lines = [
        f"[serve.tokens.{caller.token}]",
        f"hash = {show_toml(hashed)}",
        f"tenant = {show_toml(caller.tenant)}",
        f"tools = {show_toml(caller.tools)}",
    ]
    if caller.owner:
        lines.append(f"owner = {show_toml(caller.owner)}")
    if caller.rate:
        lines.append(f"rate = {show_toml(caller.rate)}")
    if caller.running_max is not None:
        lines.append(f"running_max = {caller.running_max}")
    if caller.claims:
        lines.append(f"claims = {show_toml(caller.claims)}")
    return lines
