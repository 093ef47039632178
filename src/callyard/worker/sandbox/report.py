"""The sandbox in force, in words: what the command line prints at start, and `doctor` shows."""

from __future__ import annotations

from callyard.worker.sandbox.levels import Level, Sandbox


def summarize(sandbox: Sandbox) -> str:
    """One line, and one more for each thing that is open."""
    if sandbox.level is Level.OFF:
        text = "sandbox: off, the functions run with your rights"
    else:
        limits = ", ".join(f"{limit.name} {limit.value}" for limit in sandbox.limits)
        text = f"sandbox: {sandbox.level}, network {sandbox.network}; {limits}"
    return "\n".join([text, *(f"  not there: {text}" for text in sandbox.passed_over), *_gaps(sandbox)])


def list_lines(sandbox: Sandbox) -> list[tuple[str, str]]:
    """Everything, as names and values."""
    lines = [("user", sandbox.user), ("network", sandbox.network), ("files", sandbox.files)]
    lines += [(limit.name, f"{limit.value} ({limit.by})") for limit in sandbox.limits]
    return lines + [("open", gap) for gap in sandbox.gaps]


def _gaps(sandbox: Sandbox) -> list[str]:
    return [f"  open: {gap}" for gap in sandbox.gaps]
