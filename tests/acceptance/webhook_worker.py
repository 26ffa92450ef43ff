"""A process that sends webhooks until it is stopped, or killed, maybe by itself at a named step.

Arguments: database URL, schema, authority file, then a step to die at and the seconds from poll to poll;
`main` is run by `tests.forks` too.
"""

from __future__ import annotations

import logging
import ssl
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import async_sessionmaker

from oncely import Worker
from oncely.testing import crash_at
from oncely.webhooks import Keyring, PinnedTransport, StandardWebhooks, Webhooks, WebhookSender, WebhookWorker
from tests.database import Database
from tests.webhooks import KEY, SECRET


async def here(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


def make(url: str, schema: str, authority: str, point: str = "", poll: str = "0.05") -> WebhookWorker:
    warnings.simplefilter("ignore")
    engine = Database(url, schema).engine()
    if point:
        crash_at(point).watch(engine)
    context = ssl.create_default_context(cafile=authority)
    transport = PinnedTransport(lookup=here, ssl_context=context, allow_private=True)
    webhooks = Webhooks(MetaData(), keyring=Keyring({"one": KEY}, write="one"))
    return WebhookWorker(
        webhooks,
        async_sessionmaker(engine),
        sender=WebhookSender(StandardWebhooks(SECRET), transport=transport),
        poll_interval=timedelta(seconds=float(poll)),
    )


async def main(*arguments: str) -> None:
    await make(*arguments).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.exit(Worker(make(*sys.argv[1:])).main())
