"""How an executor begins that is confined, or runs another interpreter than ours. Run as a file.

Confined, it joins its control groups while the interpreter imports the rest: to join one takes the kernel 5 to 25 ms
of waiting, about as long as the imports. The groups' descriptors (`7,8`) come before the arguments of
`callyard.executor`; `--bind` before them: the interpreter is another, so the package is this file's own; `--trial`: no
executor, but `executor.confine`.
"""

from __future__ import annotations

import _thread
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

BIND: Final = "--bind"
TRIAL: Final = "--trial"


def start_joining(fds: Sequence[int]) -> Callable[[], None]:
    """Join in a thread. What is returned waits for it, and raises its OSError."""
    errors: list[OSError] = []
    done = _thread.allocate_lock()
    done.acquire()

    def join() -> None:
        try:
            for fd in fds:
                os.write(fd, b"0")
                os.close(fd)
        except OSError as error:
            errors.append(error)
        finally:
            done.release()

    def wait() -> None:
        done.acquire()
        if errors:
            raise errors[0]

    if fds:
        _thread.start_new_thread(join, ())
    else:
        done.release()
    return wait


def bind_package() -> None:
    """Make this file's own package the one that `import callyard` finds, in an interpreter that has none, or another.

    By its path alone: the folder around it may hold packages built for another Python.
    """
    import importlib.util

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    init = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location("callyard", init, submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["callyard"] = package
    spec.loader.exec_module(package)


def launch(words: list[str]) -> NoReturn:
    if words[:1] == [BIND]:
        del words[0]
        bind_package()
    if words[:1] == [TRIAL]:
        from callyard.executor.confine import main as confine

        sys.exit(confine(words[1:]))
    joined = start_joining([int(word) for word in words[0].split(",") if word])
    from callyard.executor.__main__ import main

    main(words[1:], joined)


if __name__ == "__main__":
    launch(sys.argv[1:])
elif __name__ == "__mp_main__" and "callyard" not in sys.modules:  # user code spawned it, by multiprocessing
    bind_package()
