"""An executor's end of a pool: a call's bytes in, an answer's bytes out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from callyard.executor.budget import CallInterrupted
from callyard.functions.loading import importing
from callyard.futures.raised import skip_frame
from callyard.futures.setup import Call, Setup, decode_setup

Apply = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class ServingCodec(Protocol):
    """What an executor needs of a codec."""

    def read_call(self, call: bytes) -> Call: ...
    def write_value(self, value: Any) -> bytes: ...
    def write_raised(self, error: BaseException, *, initializer: bool = False) -> bytes: ...


class Server:
    def __init__(self, setup: bytes) -> None:
        """While the bundle is imported: what is changed in the process now stays so."""
        given = decode_setup(setup)
        _look_like_the_caller(given)
        self._codec = _codec_of(given)
        self._initializer = given.initializer
        """Empty: there is none, or it has run."""
        self._broken: bytes | None = None
        """The answer to every call once the initializer has failed."""

    def serve(self, call: bytes, apply: Apply) -> bytes:
        """The answer to a call, whatever it did. `apply` calls the user's function. Interruptions pass."""
        if self._initializer:
            self._initialize(apply)
        if self._broken is not None:
            return self._broken
        codec = self._codec
        try:
            with importing():
                called, args, kwargs = codec.read_call(call)
            value = apply(called, args, kwargs)
        except CallInterrupted:
            raise
        except BaseException as error:  # noqa: BLE001 - an answer, SystemExit included
            _skip_own(error, apply)
            return codec.write_raised(error)
        try:
            return codec.write_value(value)
        except CallInterrupted:
            raise
        except BaseException as error:  # noqa: BLE001 - what cannot be written is the call's failure
            return codec.write_raised(error)

    def _initialize(self, apply: Apply) -> None:
        """Once in this process, before its first call."""
        try:
            with importing():
                called, args, kwargs = self._codec.read_call(self._initializer)
            apply(called, args, kwargs)
        except CallInterrupted:
            raise
        except BaseException as error:  # noqa: BLE001 - it breaks the pool, with its traceback
            _skip_own(error, apply)
            self._broken = self._codec.write_raised(error, initializer=True)
        self._initializer = b""


def _look_like_the_caller(setup: Setup) -> None:
    """Modules, files and arguments are found as where the pool was made."""
    sys.path[:] = [*sys.path[:1], *setup.path, *(entry for entry in sys.path[1:] if entry not in setup.path)]
    sys.argv[:] = setup.arguments
    with suppress(OSError):  # in a sandbox it is not there
        os.chdir(setup.folder)


def _codec_of(setup: Setup) -> ServingCodec:
    if setup.codec == "json":
        from callyard.futures.json_codec import JsonServing

        return JsonServing()
    from callyard.futures.pickling import PickleServing

    return PickleServing()


def _skip_own(error: BaseException, apply: Apply) -> None:
    """Frames of this file and of `apply` are nobody's to read."""
    trace = error.__traceback__
    own = {apply.__code__.co_filename, __file__}
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        skip_frame(error)
        trace = error.__traceback__
