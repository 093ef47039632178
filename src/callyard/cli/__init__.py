"""The command line: `callyard run`, `call`, `list`. Values go to stdout; errors and progress to stderr."""

from callyard.cli.app import main

__all__ = ["main"]
