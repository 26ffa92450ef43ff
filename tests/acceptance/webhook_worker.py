"""A process that sends webhooks until it is killed, or by itself at a named step.

Arguments: database URL, schema, authority file; `main` is run by `tests.forks` too.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import async_sessionmaker

from oncely.testing import crash_at
from oncely.webhooks import Keyring, PinnedTransport, StandardWebhooks, Webhooks, WebhookSender, WebhookWorker
from tests.database import Database
from tests.webhooks import KEY, SECRET


async def here(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


async def main(url: str, schema: str, authority: str, point: str | None = None) -> None:
    warnings.simplefilter("ignore")
    engine = Database(url, schema).engine()
    if point is not None:
        crash_at(point).watch(engine)
    context = ssl.create_default_context(cafile=authority)
    transport = PinnedTransport(lookup=here, ssl_context=context, allow_private=True)
    webhooks = Webhooks(MetaData(), keyring=Keyring({"one": KEY}, write="one"))
    worker = WebhookWorker(
        webhooks,
        async_sessionmaker(engine),
        sender=WebhookSender(StandardWebhooks(SECRET), transport=transport),
        poll_interval=timedelta(milliseconds=50),
    )
    await worker.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
