"""Where a user function may connect to: host names by an allow-list, addresses by what they are.

An address is judged after the name was resolved and in every form it can be written in, because the name says nothing
about where it leads. IPv4 inside IPv6 (mapped, compatible, 6to4, NAT64, Teredo) is judged as the IPv4 it reaches.
Source: call-execution X42.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address

LITERAL_CHARACTERS_MAX: Final = 45
"""Of `ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255`."""
_NAT64: Final = IPv6Network("64:ff9b::/96")
_COMPATIBLE: Final = IPv6Network("::/96")
_NAMED: Final[tuple[tuple[Network, str], ...]] = tuple(
    (ip_network(network), name)
    for network, name in (
        ("0.0.0.0/8", "unspecified"),
        ("100.64.0.0/10", "shared address space"),
        ("192.0.0.0/24", "reserved"),
        ("192.88.99.0/24", "reserved"),
        ("198.18.0.0/15", "reserved"),
        ("255.255.255.255/32", "broadcast"),
        ("64:ff9b:1::/48", "private"),
        ("100::/64", "reserved"),
        ("2001::/23", "reserved"),
        ("2001:db8::/32", "reserved"),
        ("3fff::/20", "reserved"),
        ("5f00::/16", "reserved"),
        ("fec0::/10", "private"),
    )
)
"""Networks that Python's properties name otherwise, or not in every version."""


def parse_address(text: str) -> Address | None:
    """A literal, without its zone; None: it is a name, or a form that only the resolver understands."""
    bare = text.partition("%")[0]
    # A literal has a colon, or ends with a digit. Most hosts are names, and to learn that from an exception is slow.
    if len(bare) > LITERAL_CHARACTERS_MAX or not (":" in bare or bare[-1:].isdigit()):
        return None
    return _read_literal(bare)


@lru_cache(1_024)
def _read_literal(text: str) -> Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def find_refusal(address: Address, allowed: Sequence[Network] = ()) -> str | None:
    """What kind of place it is, when functions may not connect there; None: a public one, or one in `allowed`."""
    inner = _reached(address)
    for network in allowed:
        if _holds(network, address) or _holds(network, inner):
            return None
    for one in (inner, address):
        kind = _kind(one)
        if kind is not None:
            return kind
    return None


def _reached(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one, else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 0xFFFF):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


@lru_cache(1_024)
def _kind(address: Address) -> str | None:
    if isinstance(address, IPv6Address) and _reached(address) is not address:
        return None  # judged as the IPv4 it reaches
    if address.is_unspecified:
        return "unspecified"
    if address.is_loopback:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    if address.is_multicast:
        return "multicast"
    for network, name in _NAMED:
        if _holds(network, address):
            return name
    if address.is_private and not address.is_reserved:
        return "private"
    return None if address.is_global and not address.is_reserved else "reserved"


def _holds(network: Network, address: Address) -> bool:
    return network.version == address.version and address in network


@dataclass(frozen=True, slots=True)
class _Rule:
    """One pattern, read."""

    host: str
    port: int | None
    literal: Address | None

    def permits(self, host: str, port: int, literal: Address | None) -> bool:
        if self.port is not None and self.port != port:
            return False
        if self.host == "*" or self.host == host:
            return True
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return literal is not None and literal == self.literal


@dataclass(frozen=True, slots=True)
class HostRules:
    """`*` any host; `*.example.com` what is below it; `example.com` or `example.com:8443`; an address."""

    patterns: tuple[str, ...]
    _rules: tuple[_Rule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pairs = [split_port(pattern) for pattern in self.patterns]
        object.__setattr__(self, "_rules", tuple(_Rule(host, port, parse_address(host)) for host, port in pairs))

    def permits(self, host: str, port: int) -> bool:
        """`host` as it is connected to: lower case, IDNA, no brackets."""
        host = host.rstrip(".")
        literal = parse_address(host)
        return any(rule.permits(host, port, literal) for rule in self._rules)


def normalize_pattern(text: str) -> str:
    """Raises ValueError for what can never match."""
    pattern = text.strip().lower().rstrip(".")
    if not pattern or "/" in pattern or "@" in pattern or any(c.isspace() for c in pattern):
        raise ValueError(f"expected a host such as api.example.com, *.example.com, example.com:8443 or *, got {text!r}")
    host, _ = split_port(pattern)
    if "*" in host and host != "*" and not (host.startswith("*.") and "*" not in host[2:]):
        raise ValueError(f"a * may stand alone or as the first part, as in *.example.com; got {text!r}")
    if not pattern.isascii():
        pattern = pattern.encode("idna").decode("ascii")
    return pattern


def split_port(pattern: str) -> tuple[str, int | None]:
    """`example.com:8443`, `[::1]:80`, `::1`; None: any port."""
    host, colon, port = pattern.rpartition(":")
    if colon and port.isdigit() and (":" not in host or host.startswith("[")):
        return host.strip("[]"), int(port)
    return pattern.strip("[]"), None
