# /// script
# requires-python = ">=3.11"
# dependencies = ["greeting-under-test"]
# ///
import greeting_under_test


def greet(name: str) -> str:
    return greeting_under_test.greet(name)
