"""What a future raises beside what the function itself raised."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool

from callyard.errors import CallFailure


class ExecutorCrashed(BrokenProcessPool):
    """The process that ran this call died. It may have had an effect, and is not run again; the pool goes on.

    `failure` says how it ended.
    """

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return f"{self.failure.message}; only this call is lost, and it is not run again: it may have had an effect"
