"""Addresses that are ours before anything is served there: who starts slowly is told at once that one is taken.

Nobody can connect to one until a listener has it; until then connections are refused, as if there were no server. Of
two that start at the same time both may be bound, and the one that listens later is told then.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from callyard.errors import UsageError

Bound = Sequence[socket.socket]
"""Sockets that are bound and do not listen: one, or one for each address of a name."""


def bind_address(host: str, port: int) -> Bound:
    """Raises UsageError: it is taken, or not an address of this machine."""
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                one = socket.socket(family, kind, protocol)
            except OSError:  # a family that this machine does not have
                continue
            bound.append(one)
            one.setblocking(False)
            if os.name == "posix":  # else a port that was just left is not to be had for a minute
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
        if not bound:
            raise UsageError(f"cannot listen on {host}:{port}: this machine has no such kind of address")
    except (OSError, UnicodeError) as error:
        close_bound(bound)
        raise cannot_listen(host, port, error) from error
    return bound


def close_bound(bound: Bound) -> None:
    """A second time, and of one that a listener has closed, nothing happens."""
    for one in bound:
        one.close()


def cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> UsageError:
    number = error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
    why = os.strerror(number) if number else str(error)
    return UsageError(f"cannot listen on {host}:{port}: {why}; give another address with --http or --admin")
