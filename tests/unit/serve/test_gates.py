"""Gates are loaded before anything starts, so that what is missing is told at once."""

from __future__ import annotations

import sys

import pytest

import callyard.serve
from callyard.cli.screen import Screen
from callyard.cli.serve import load_gates
from callyard.errors import UsageError
from callyard.serve.config import HTTP, ServeConfig


@pytest.mark.parametrize(("config", "library"), [(ServeConfig(), "mcp"), (ServeConfig(http=HTTP), "starlette")])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, config: ServeConfig, library: str) -> None:
    for name in list(sys.modules):
        if name.startswith(("callyard.serve.mcp_", "callyard.serve.http_app", "callyard.serve.guard")):
            monkeypatch.delitem(sys.modules, name)
            monkeypatch.delattr(callyard.serve, name.rpartition(".")[2], raising=False)
        elif name.partition(".")[0] == library:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=r"pip install 'callyard\[serve\]'") as refused:
        load_gates(config, Screen(), quiet=True)
    assert library in str(refused.value)
