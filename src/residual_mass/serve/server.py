"""The server process: uvicorn, which ends within seconds of a signal."""

from __future__ import annotations

from types import FrameType

import uvicorn
from fastapi import FastAPI

from residual_mass.serve.worker import Worker

CLOSING_SECONDS = 3
"""Seconds that connections have to end after a signal."""


def serve(app: FastAPI, host: str, port: int, worker: Worker) -> None:
    """Serves until a signal comes: running answers are broken off then, and the application closes."""
    config = uvicorn.Config(app, host=host, port=port, timeout_graceful_shutdown=CLOSING_SECONDS, access_log=False)
    Server(config, worker).run()


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self.worker = worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.worker.leave()
        super().handle_exit(sig, frame)
