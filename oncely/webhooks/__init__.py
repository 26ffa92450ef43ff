"""Webhooks: signed, encrypted while they wait, sent to public addresses only; and how to receive them.

    enqueue ─▶ row ┃table┃ worker ─▶ PinnedTransport ┃wire┃ verifier ─▶ inbox ─▶ your handler

Read `outbox.py` first, then `leases.py` (who sends), `delivery.py` (one attempt) and `worker.py`.
"""

from oncely.errors import (
    AddressRefused,
    SealBroken,
    SealingKeyMissing,
    SignatureInvalid,
    SigningScopeUnknown,
    WebhookReused,
)
from oncely.extras import needs

needs("webhooks", "cryptography", "h11", "http_message_signatures", "httpx")

from oncely.webhooks.addresses import Lookup, is_public
from oncely.webhooks.delivery import WebhookAttempt
from oncely.webhooks.outbox import Webhooks
from oncely.webhooks.outcome import Outcome
from oncely.webhooks.records import OriginStats, Resealed, State, WebhookRecord, WebhookStats
from oncely.webhooks.sealing import Keyring
from oncely.webhooks.sending import WebhookSender
from oncely.webhooks.signing import HttpSignatures, Message, Signer, StandardWebhooks
from oncely.webhooks.transport import PinnedTransport, PrivateAddressesAllowed
from oncely.webhooks.verifying import HttpSignaturesVerifier, StandardWebhooksVerifier, Verified
from oncely.webhooks.worker import WebhookRun, WebhookWorker

__all__ = [
    "AddressRefused",
    "HttpSignatures",
    "HttpSignaturesVerifier",
    "Keyring",
    "Lookup",
    "Message",
    "OriginStats",
    "Outcome",
    "PinnedTransport",
    "PrivateAddressesAllowed",
    "Resealed",
    "SealBroken",
    "SealingKeyMissing",
    "SignatureInvalid",
    "Signer",
    "SigningScopeUnknown",
    "StandardWebhooks",
    "StandardWebhooksVerifier",
    "State",
    "Verified",
    "WebhookAttempt",
    "WebhookRecord",
    "WebhookReused",
    "WebhookRun",
    "WebhookSender",
    "WebhookStats",
    "WebhookWorker",
    "Webhooks",
    "is_public",
]
