"""A script that is its own target."""

import callyard


def fare(km: int) -> int:
    return 3 + 2 * km


if __name__ == "__main__":
    for result in callyard.run(f"{__file__}:fare", [{"km": 4}], executors=1):
        print(result.unwrap())
