"""What an executor of a pool is given before its first call: a file in its bundle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

CodecName = Literal["pickle", "json"]
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its arguments, and those that have names."""
SETUP_FILE: Final = "setup.bin"
TARGET_MODULE: Final = "callyard_pool_calls"
"""The name under which `target.py` is imported in an executor."""


class Setup(msgspec.Struct, frozen=True):
    codec: CodecName
    path: list[str]
    """The caller's `sys.path`."""
    arguments: list[str]
    """The caller's `sys.argv`."""
    folder: str
    """The caller's working folder when the pool was started."""
    initializer: bytes
    """A call, as the codec writes it; empty: there is none."""


encode_setup: Final = msgspec.msgpack.Encoder().encode
decode_setup: Final = msgspec.msgpack.Decoder(Setup).decode
