"""The command line: `callyard run`, `call`, `list`. Values go to stdout; errors and progress to stderr."""

__all__ = ["main"]


def main() -> None:
    """The `callyard` command. Everything it needs is imported under handlers that end it without a traceback."""
    from callyard.cli.interrupts import leave_on_signals
    from callyard.cli.streams import open_missing_streams

    open_missing_streams()
    leave_on_signals()
    from callyard.cli.app import app

    app()
