"""`Registry.load`: the functions of a file, known before there is a worker.

An executor imports the file and describes it, under the same settings (audit policy, spawn mode) as a worker's own; it
ends with the loading. The calling process imports nothing of it. Source: tool-dispatch D6, D50.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from callyard.errors import UsageError
from callyard.functions import registry
from callyard.system import check_system


class Registry(registry.Registry):
    """A registry that can have its file described."""

    @classmethod
    async def aload(
        cls,
        path: str | os.PathLike[str],
        *,
        include: Iterable[str] = (),
        audit: object = None,
        audit_log: str | Path | None = None,
        **settings: Any,
    ) -> Self:
        """The described registry of a file. `audit` and `settings` as for `Worker`, which takes the result as it is.

        Raises UsageError when the file is no target or does not load, AuditRefused when the policy refuses it.
        """
        check_system()
        from callyard.worker.worker import Worker  # a registry of inline handlers does without it

        found = await asyncio.to_thread(cls.for_target, path, include=include)
        settings = {"spare_executors": 0, **settings}
        worker = Worker(found, executors=1, audit=audit, audit_log=audit_log, **settings)
        await worker.start(only_describe=True)
        await worker.close(drain=False)
        return found

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """`aload` from code that has no event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(cls.aload(path, **options))
        raise UsageError("an event loop runs here: write `await Registry.aload(…)`")
