"""Which numbers are prime; many short calls, several of them at a time."""

import concurrent.futures
import math
import sys

PRIMES = [112272535095293, 112582705942171, 112272535095294, 115280095190773, *range(2, 600)]


def is_prime(n):
    if n < 2:
        return False
    if n == 2:
        return True
    if n % 2 == 0:
        return False
    return all(n % i for i in range(3, min(math.isqrt(n) + 1, 20_000), 2))


def main():
    with concurrent.futures.ProcessPoolExecutor(2) as executor:
        found = [n for n, prime in zip(PRIMES, executor.map(is_prime, PRIMES, chunksize=50), strict=True) if prime]
    print(len(found), sum(found), sys.argv[2:])


if __name__ == "__main__":
    main()
