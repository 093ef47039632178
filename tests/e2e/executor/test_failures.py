"""What a failure carries: stack and, when asked for, local variables (X56)."""

from __future__ import annotations

import pytest

from tests.e2e.executor.driver import Driver

SOURCE = """
import json

class Loud:
    def __repr__(self):
        raise ValueError("no repr")

class Long:
    def __repr__(self):
        return "L" * 100_000

def outer(x: int):
    secret_token = "s3cr3t"
    return inner(x)

def inner(x: int):
    city = "Paris"
    db_password = "hunter2"
    settings = {"api_key": "k-123", "size": 3}
    loud, long = Loud(), Long()
    return 1 // x

def through_library(text: str):
    mine = "here"
    return json.loads(text)

def many():
    for i in range(2_000):
        globals()[f"g{i}"] = i
    scope = "\\n".join(f"    v{i} = {'y' * 100!r}" for i in range(200))
    namespace = {}
    exec(compile(f"def f():\\n{scope}\\n    1 / 0", __file__, "exec"), namespace)
    namespace["f"]()

def deep(n: int):
    if n == 0:
        raise ValueError("at the bottom")
    return deep(n - 1) if n % 2 else deeper(n - 1)

def deeper(n: int):
    return deep(n)

def caused():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise LookupError("because") from error

async def a_fail():
    raise ValueError("async")
"""


@pytest.mark.requirement("X56")
def test_stack_is_the_users_alone() -> None:
    with Driver(SOURCE) as driver:
        failed = driver.failure("outer", 0).payload
        assert failed.error_message == "ZeroDivisionError: integer division or modulo by zero"
        assert "in outer" in failed.error_stack
        assert "in inner" in failed.error_stack
        assert "return 1 // x" in failed.error_stack
        assert "callyard/executor" not in failed.error_stack
        assert (failed.retryable, failed.local_variables) == (False, {})
        caused = driver.failure("caused").payload.error_stack
        assert caused.index("ZeroDivisionError") < caused.index("direct cause") < caused.index("LookupError: because")
        assert "in a_fail" in driver.failure("a_fail").payload.error_stack


@pytest.mark.requirement("X56")
@pytest.mark.requirement("X79")
def test_a_long_stack_is_cut_in_the_middle() -> None:
    with Driver(SOURCE) as driver:
        stack = driver.failure("deep", 500).payload.error_stack
        assert len(stack.encode()) <= 16 * 1024
        assert stack.startswith("Traceback")
        assert "cut" in stack
        assert stack.endswith("ValueError: at the bottom\n")


@pytest.mark.requirement("X56")
def test_local_variables_of_the_innermost_user_frame_masked_and_cut() -> None:
    with Driver(SOURCE, "--capture-locals") as driver:
        shown = driver.failure("outer", 0).payload.local_variables
        assert shown["city"] == "'Paris'"
        assert shown["x"] == "0"
        assert shown["db_password"] == "<masked>"
        assert shown["settings"] == "{'api_key': <masked>, 'size': 3}"
        assert shown["loud"] == "<its __repr__ raised ValueError>"
        assert len(shown["long"]) < 1_000
        assert "hunter2" not in str(shown)
        assert "k-123" not in str(shown)
        assert "secret_token" not in shown  # that is the outer frame's
        # The innermost frame of the bundle, not of the library below it.
        assert driver.failure("through_library", "{").payload.local_variables["mine"] == "'here'"


@pytest.mark.requirement("X56")
@pytest.mark.requirement("X79")
def test_many_local_variables_are_cut() -> None:
    with Driver(SOURCE, "--capture-locals") as driver:
        shown = driver.failure("many").payload.local_variables
        assert sum(len(name) + len(text) for name, text in shown.items()) <= 9 * 1024
        assert shown["…"].endswith("more, cut")
