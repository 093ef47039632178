"""The way to a Redis server: scripts that are asked at the same time go together, and no step hangs.

One connection carries the scripts, one batch at a time, each step in its order; a second one is there for the one who
reads a stream. Every failure is a StoreUnavailable: what is lost on the way is asked once more, what does not come in
time or is refused is not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

from callyard.dispatch.stores.port import StoreUnavailable
from callyard.errors import UsageError
from callyard.extras import needs

AGAIN: Final = object()
"""As an argument of a script: 0 when it is asked first, 1 when it is asked again because its answer was lost."""
_BATCH_MAX: Final = 128
_BATCH_BYTES_MAX: Final = 4 << 20
"""A batch ends with the step that passes it."""

T = TypeVar("T")


class _Step(NamedTuple):
    script: str
    keys: Sequence[bytes]
    args: Sequence[Any]
    answer: asyncio.Future[Any]


class Refused(StoreUnavailable):
    """The server answered, with an error: nothing was done."""


class _ConnectionBroken(StoreUnavailable):
    """Perhaps only this connection: the same may be asked again."""


class RedisLink:
    """`scripts`: Lua text by name. `timeout_s` bounds each exchange. Belongs to the loop that opened it."""

    def __init__(self, url: str, scripts: Mapping[str, str], timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self.place = mask_url(url)
        self._scripts = scripts
        self._digests: dict[str, str] = {}
        self._client: Any = None
        self._asked: deque[_Step] = deque()
        self._sending: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._client is not None

    async def open(self) -> None:
        """Raises UsageError for an address or a password that cannot be right."""
        self._client = self._connect()
        try:
            await self._load_scripts()
        except BaseException as error:
            await self.close()
            from redis.exceptions import AuthenticationError

            if isinstance(error.__cause__, AuthenticationError):
                raise UsageError(f"{self.place} refused the user or password of the key store's address") from error
            raise

    async def close(self) -> None:
        """What was asked and is not answered ends StoreUnavailable."""
        client, self._client = self._client, None
        if client is None:
            return
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await client.aclose()

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """The script's answer. Cancelling it does not stop the step."""
        if self._client is None:
            raise StoreUnavailable("the key store is not open")
        # Here and not in a batch: text that is not Unicode is its caller's own error.
        names = [key.encode() for key in keys]
        values = [arg.encode() if isinstance(arg, str) else arg for arg in args]
        step = _Step(script, names, values, asyncio.get_running_loop().create_future())
        self._asked.append(step)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="callyard-key-steps")
        return await step.answer

    async def ask(self, question: Callable[[Any], Awaitable[T]], longer_s: float = 0.0) -> T:
        """The answer to something asked of the client itself, on a connection beside the scripts' one."""
        if self._client is None:
            raise StoreUnavailable("the key store is not open")
        from redis import exceptions

        bound_s = self._timeout_s + longer_s
        try:
            async with asyncio.timeout(bound_s):
                return await question(self._client)
        except (TimeoutError, exceptions.TimeoutError) as error:
            raise StoreUnavailable(f"{self.place} did not answer within {bound_s:g} s") from error
        except exceptions.BusyLoadingError as error:
            raise StoreUnavailable(f"{self.place} is still loading its data") from error
        except (exceptions.ConnectionError, OSError) as error:
            raise _ConnectionBroken(f"{self.place} cannot be reached: {error}") from error
        except exceptions.RedisError as error:
            raise Refused(f"{self.place} refused: {error}") from error

    async def _send(self) -> None:
        batch: list[_Step] = []
        try:
            while self._asked:
                batch = self._take()
                try:
                    try:
                        await self._exchange(batch, again=False)
                    except _ConnectionBroken:
                        await self._exchange([step for step in batch if not step.answer.done()], again=True)
                except StoreUnavailable as error:
                    self._fail(batch, error)  # and who came meanwhile: else each batch would wait out its time
        finally:
            self._sending = None
            self._fail(batch, StoreUnavailable(f"asking {self.place} was stopped"))

    def _take(self) -> list[_Step]:
        batch: list[_Step] = []
        size = 0
        while self._asked and len(batch) < _BATCH_MAX and size < _BATCH_BYTES_MAX:
            batch.append(self._asked.popleft())
            size += sum(len(arg) for arg in batch[-1].args if isinstance(arg, bytes))
        return batch

    async def _exchange(self, batch: list[_Step], *, again: bool) -> None:
        """Each step of the batch gets its answer, or all of it raises."""
        from redis.exceptions import NoScriptError, RedisError

        def put(steps: list[_Step]) -> Callable[[Any], Awaitable[list[Any]]]:
            async def execute(client: Any) -> list[Any]:
                pipeline = client.pipeline(transaction=False)
                for step in steps:
                    args = [int(again) if arg is AGAIN else arg for arg in step.args]
                    pipeline.evalsha(self._digests[step.script], len(step.keys), *step.keys, *args)
                answers: list[Any] = await pipeline.execute(raise_on_error=False)
                return answers

            return execute

        steps = batch
        answers = await self.ask(put(steps))
        missing = [step for step, answer in zip(steps, answers, strict=True) if isinstance(answer, NoScriptError)]
        if missing:  # the server was restarted: it did nothing of these
            await self._load_scripts()
            again_answers = iter(await self.ask(put(missing)))
            answers = [next(again_answers) if isinstance(answer, NoScriptError) else answer for answer in answers]
        for step, answer in zip(steps, answers, strict=True):
            if step.answer.done():  # its caller was cancelled
                continue
            if isinstance(answer, RedisError):
                refused = Refused(f"{self.place} refused: {answer}")
                refused.__cause__ = answer
                step.answer.set_exception(refused)
            else:
                step.answer.set_result(answer)

    def _fail(self, batch: list[_Step], error: StoreUnavailable) -> None:
        for step in (*batch, *self._asked):
            if not step.answer.done():
                step.answer.set_exception(error)
        self._asked.clear()

    async def _load_scripts(self) -> None:
        for name, text in self._scripts.items():
            self._digests[name] = await self.ask(lambda client, text=text: client.script_load(text))  # type: ignore[misc]

    def _connect(self) -> Any:
        with needs("redis", "a key store in Redis"):
            from redis.asyncio import BlockingConnectionPool, Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        try:
            pool = BlockingConnectionPool.from_url(
                self._url,
                max_connections=4,  # scripts, the reader of a stream, and questions beside them
                timeout=self._timeout_s,
                socket_connect_timeout=self._timeout_s,
                socket_timeout=None,  # `ask` bounds the whole exchange; a read of a stream waits longer
                retry=Retry(NoBackoff(), 0),  # only scripts are asked again, and they are told
                protocol=2,
            )
            pool.make_connection()  # type: ignore[no-untyped-call]  # finds options that no connection has
        except (ValueError, TypeError):
            raise UsageError(
                f"not an address of Redis, or options that it has not: {self.place}; expected "
                "redis://[[user]:password@]host:port/db, rediss:// for TLS, or unix://path"
            ) from None  # the cause may hold the password
        return Redis.from_pool(pool)


def mask_url(url: str) -> str:
    """An address as it may be shown: without user, password and options."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "(an address that cannot be read)"
    return f"{parts.scheme}://{host}{port}{parts.path}"
