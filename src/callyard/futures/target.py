"""The functions that executors of a pool run. This file is their bundle: it is imported there under a name of its own.

The user's function is called here and not in the package, whose code is never interrupted: a function written in C
has no frame but its caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from callyard.functions.function import function
from callyard.futures.serving import Server
from callyard.futures.setup import SETUP_FILE

_server = Server(Path(__file__).with_name(SETUP_FILE).read_bytes())


@function
def run(call: bytes) -> bytes:
    return _server.serve(call, _apply)


@function(idempotent=True)
def run_again(call: bytes) -> bytes:
    return _server.serve(call, _apply)


def _apply(called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return called(*args, **kwargs)
