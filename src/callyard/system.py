"""Where executors can run."""

from __future__ import annotations

import sys

from callyard.errors import UsageError


def check_system() -> None:
    """Raises UsageError where they cannot."""
    if sys.platform == "win32":
        raise UsageError("executors need Linux or macOS; on Windows use WSL2 (inline handlers run on Windows as well)")
