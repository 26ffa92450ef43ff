"""A web application that runs its worker itself: DATABASE_URL, REDIS_URL and STREAM say where."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from fastapi import FastAPI

from tests.acceptance.worker_process import make_worker


def create_app() -> FastAPI:
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    worker = make_worker(
        os.environ["DATABASE_URL"], os.environ["REDIS_URL"], os.environ["STREAM"], timedelta(seconds=5)
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        stop = asyncio.Event()
        working = asyncio.create_task(worker.run(stop))
        yield
        stop.set()
        await working

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> list[dict[str, str | bool | None]]:
        return [each.to_json() for each in worker.health()]

    return app
