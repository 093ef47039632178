"""A host's failure in the dispatcher's words, row by row."""

from __future__ import annotations

import pytest

from callyard.errors import ErrorKind
from callyard.host.errors import ERROR_KINDS, HostErrorKind

ROWS = {
    "NOT_FOUND": "not_found",
    "REJECTED": "denied",
    "CAPACITY_EXCEEDED": "unavailable",
    "UNAVAILABLE": "unavailable",
    "DEADLINE_EXCEEDED": "deadline",
    "SHUTTING_DOWN": "shutting_down",
    "PROTOCOL_ERROR": "schema",
}


@pytest.mark.requirement("D38")
@pytest.mark.parametrize("kind", HostErrorKind, ids=lambda kind: kind.name)
def test_each_kind_of_the_host_has_one_of_the_dispatcher(kind: HostErrorKind) -> None:
    assert ERROR_KINDS[kind] is ErrorKind(ROWS.get(kind.name, "internal"))
