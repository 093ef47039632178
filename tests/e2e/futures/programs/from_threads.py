"""One pool for an event loop and for threads, and calls that are made when others have ended."""

import asyncio
import functools
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor


def cube(n, plus=0):
    return n**3 + plus


async def in_a_loop(executor):
    loop = asyncio.get_running_loop()
    calls = [loop.run_in_executor(executor, functools.partial(cube, n, plus=1)) for n in range(20)]
    return sum(await asyncio.gather(*calls))


def in_a_thread(executor, n):
    return executor.submit(cube, executor.submit(cube, n).result()).result()


def main():
    with ProcessPoolExecutor(max_workers=2) as executor:
        print(asyncio.run(in_a_loop(executor)))
        with ThreadPoolExecutor(4) as threads:
            print(sum(threads.map(functools.partial(in_a_thread, executor), range(8))))
        chained = []
        first = executor.submit(cube, 2)
        first.add_done_callback(lambda done: chained.append(executor.submit(cube, done.result())))
        first.result()
        executor.submit(cube, 1).result()
        print(chained[0].result())


if __name__ == "__main__":
    main()
