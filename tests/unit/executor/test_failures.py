from __future__ import annotations

import pytest

from callyard.errors import ErrorKind, ToolError, TransientError
from callyard.executor import failures
from callyard.functions import raised


@pytest.mark.requirement("X56")
@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("password", "db_passwd", "apiKey", "API_KEY", "AUTH_TOKEN", "key", "private_rsa")),
        *((name, True) for name in ("client_secret", "cookie", "session", "credentials", "pwd")),
        *((name, False) for name in ("monkey", "keyboard", "author", "city", "spinner", "passenger", "sessions_total")),
    ],
)
def test_names_that_look_like_secrets(name: str, secret: bool) -> None:
    assert failures.is_secret(name) is secret


@pytest.mark.requirement("X79")
def test_a_stack_is_cut_by_bytes_and_keeps_both_ends() -> None:
    text = "Traceback\n" + "é" * 20_000 + "\nValueError: end\n"
    cut = raised.cut_stack(text)
    assert len(cut.encode()) <= raised.STACK_BYTES_MAX
    assert cut.startswith("Traceback")
    assert cut.endswith("ValueError: end\n")
    assert "bytes and more cut" in cut
    assert raised.cut_stack("short") == "short"
    assert raised.cut_stack("lone \udc80") == "lone \\udc80"


@pytest.mark.parametrize(
    ("error", "kind", "message", "details"),
    [
        (ValueError("x"), ErrorKind.INTERNAL, "ValueError: x", {}),
        (ValueError(), ErrorKind.INTERNAL, "ValueError", {}),
        (ToolError("no such city"), ErrorKind.TOOL_ERROR, "no such city", {}),
        (ToolError(), ErrorKind.TOOL_ERROR, "ToolError", {}),
        (TransientError("busy"), ErrorKind.TRANSIENT, "busy", {}),
        (TransientError(retry_after_ms=5), ErrorKind.TRANSIENT, "TransientError", {"retry_after_ms": 5}),
        (TransientError("odd", retry_after_ms=1 << 70), ErrorKind.TRANSIENT, "odd", {}),
        (MemoryError(), ErrorKind.RESOURCE_LIMIT, "MemoryError", {}),
        (SystemExit(), ErrorKind.INTERNAL, "SystemExit", {"exit_code": 0}),
        (SystemExit(258), ErrorKind.INTERNAL, "SystemExit: 258", {"exit_code": 2}),
        (SystemExit("bye"), ErrorKind.INTERNAL, "SystemExit: bye", {"exit_code": 1}),
    ],
)
def test_kind_and_message_of_what_was_raised(
    error: BaseException, kind: ErrorKind, message: str, details: dict[str, int]
) -> None:
    fault = failures.describe(error, root="/nowhere", with_locals=False)
    assert (fault.kind, fault.message, fault.details) == (kind, message, details)


def test_a_chain_of_causes_that_bites_its_tail() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert "first" in failures.describe(first, root="/nowhere", with_locals=False).stack


def test_a_chain_of_thousands_of_causes_is_cut() -> None:
    error = ValueError("last")
    link: BaseException = error
    for number in range(20_000):
        link.__context__ = KeyError(number)
        link = link.__context__
    text = failures.stack_of(error)
    assert "ValueError: last" in text
    assert text.count("KeyError") == raised.CHAIN_MAX


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("/bundle/data/a b.csv", " (data files are sent along only when they are included: --include 'data/a b.csv')"),
        ("/elsewhere/a.csv", ""),
        ("a.csv", ""),
        (5, ""),
    ],
)
def test_a_file_that_is_not_in_the_bundle_is_told_with_the_option_that_brings_it(name: object, advice: str) -> None:
    error = FileNotFoundError(2, "none", name)
    message = failures.describe(error, root="/bundle", with_locals=False).message
    assert message == f"FileNotFoundError: {str(error).replace('/bundle/', '')}{advice}"
