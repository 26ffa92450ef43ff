"""A web application that runs its worker itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from tests.acceptance.worker_process import from_environment


def create_app() -> FastAPI:
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    worker = from_environment()

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
