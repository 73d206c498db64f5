"""One thread that generates, and the queue before it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from residual_mass.serve.answers import Left
from residual_mass.serve.protocol import Bad

log = logging.getLogger(__name__)

DONE = object()


@dataclass
class Job:
    """Work of one request, whose results go to the event loop.

    Attributes:
        work: yields results; its argument tells whether the client has left.
    """

    work: Callable[[Callable[[], bool]], Iterator[Any]]
    loop: asyncio.AbstractEventLoop
    results: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    left: threading.Event = field(default_factory=threading.Event)

    def send(self, result: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended, and so has the client's connection
            self.loop.call_soon_threadsafe(self.results.put_nowait, result)


class Worker:
    """Runs one job after the other in a thread.

    Args:
        most: jobs that may wait.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._current: Job | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of jobs that wait and whose clients have not left."""
        return sum(job is not None and not job.left.is_set() for job in list(self._jobs.queue))

    async def results(self, work: Callable[[Callable[[], bool]], Iterator[Any]]) -> AsyncGenerator[Any, None]:
        """Yields the results of a job; leaving the iteration ends the job.

        Raises:
            Bad: too many jobs wait, or the server ends.
        """
        if self._closed:
            raise Bad("the server ends", status=503)
        waiting = self.waiting
        if waiting >= self.most:
            raise Bad(f"{waiting} requests wait already: try again later", status=429)
        job = Job(work, asyncio.get_running_loop())
        self._jobs.put(job)
        try:
            while True:
                result = await job.results.get()
                if result is DONE:
                    return
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            job.left.set()

    def leave(self) -> None:
        """Breaks off the running job and those that wait, and takes no more."""
        self._closed = True
        for job in list(self._jobs.queue):
            if job is not None:
                job.left.set()
                job.send(Bad("the server ends", status=503))
        if self._current is not None:
            self._current.left.set()

    def close(self, seconds: float = 5.0) -> None:
        """Ends the thread."""
        self.leave()
        self._jobs.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.left.is_set():
                continue
            self._current = job
            try:
                for result in job.work(job.left.is_set):
                    job.send(result)
                job.send(DONE)
            except Left:
                job.send(Bad("the server ends", status=503))
            except BaseException as error:  # whatever it is, a panic of Rust too, the next client gets an answer
                if not isinstance(error, Bad):
                    log.exception("a request failed")
                job.send(error if isinstance(error, Exception) else RuntimeError(str(error)))
            self._current = None
