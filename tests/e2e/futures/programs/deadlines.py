"""Answers as they come; what raises, what is late, what was never begun."""

from concurrent.futures import (
    FIRST_EXCEPTION,
    CancelledError,
    ProcessPoolExecutor,
    as_completed,
    wait,
)
from time import sleep


class OutOfStock(Exception):
    def __init__(self, item, left):
        super().__init__(item, left)
        self.item = item
        self.left = left


def order(item, left):
    if left == 0:
        raise OutOfStock(item, left)
    if left < 0:
        raise ValueError(f"{item}: {left}")
    return f"{item} ordered"


def main():
    told = []
    with ProcessPoolExecutor(max_workers=1) as executor:
        names = {executor.submit(order, f"item {n}", n): n for n in range(-1, 3)}
        for future in as_completed(names, timeout=60):
            try:
                told.append(future.result())
            except OutOfStock as error:
                told.append(f"none left of {error.item}")
            except ValueError as error:
                told.append(f"{type(error.__cause__).__name__.strip('_')} {error}")
        late = executor.submit(sleep, 0.4)
        rest = [executor.submit(order, "late", 1) for _ in range(20)]
        try:
            late.result(timeout=0.01)
        except TimeoutError:
            told.append("late")
        told.append(rest[-1].cancel())
        done, waiting = wait([late, *rest[:-1]], return_when=FIRST_EXCEPTION)
        told.append((len(done), len(waiting)))
        try:
            rest[-1].result()
        except CancelledError:
            told.append("cancelled")
    try:
        executor.submit(order, "x", 1)
    except RuntimeError as error:
        told.append(str(error))
    for line in sorted(map(str, told)):
        print(line)


if __name__ == "__main__":
    main()
