"""How a confined executor begins: it joins its control groups while the interpreter imports the rest.

To join a group takes the kernel 5 to 25 ms of waiting, about as long as the imports. Run as a file, with the groups'
descriptors (`7,8`) before the arguments of `callyard.executor`: a module of the package would import that first.
"""

from __future__ import annotations

import _thread
import os
import sys
from collections.abc import Callable, Sequence


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


if __name__ == "__main__":
    joined = start_joining([int(word) for word in sys.argv[1].split(",") if word])
    from callyard.executor.__main__ import main

    main(sys.argv[2:], joined)
