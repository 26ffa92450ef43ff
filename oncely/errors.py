"""What can go wrong, as one tree. Facts are attributes; nobody has to read a message.

OncelyError
├── InvalidKey (ValueError)     a scope or key that cannot be stored, refused before any SQL
├── KeyReused                   the key came back with another request
├── KeyInFlight                 the first caller of this key has not finished
├── KeyInUse                    the key was used again inside its own work
├── KeyLost                     a key's transaction ended, or was to end, before its answer was stored
├── KeyUnanswered               the key was committed without an answer; its work may have happened
├── NoTransaction               the connection is in autocommit: nothing could be atomic on it
├── TransactionEnded            a message's work ended the transaction that its inbox row is in
├── TablesMissing               the database does not have the table: the migration has not run there
├── RowsHidden                  a row is in the way, and the database does not show it to this role
├── TableNameTaken (ValueError) the MetaData has another table of that name
├── DedupKeyReused              an event's dedup_key came back with another event
├── CancelUnsafe                cancel cannot be right at the caller's isolation level
├── ClaimLost                   a batch was published for longer than its lease
├── PublishFailed               a publisher sent some events of a batch and not others
├── PublisherUnavailable        the broker is away; no event is to blame
├── EffectPending               another owner is making this call now
├── EffectUnknown               the call may have happened and nobody can tell
├── EffectFailed                the call did not happen, for good
├── EffectLost                  the owner of a call lost its claim before it could record the end
├── WebhookReused               a webhook's key came back with other content
├── SealingKeyMissing           the keyring lacks the key that a webhook was sealed with
├── SealBroken                  a sealed webhook does not open: it was changed, or moved to another row
├── AddressRefused              a webhook's host is at an address that is not public
└── SignatureInvalid            a webhook that came in was not signed by whom it says, or not just now

Reject                          raised by your publisher or handler: no retry can mend this
Refused                         raised by your work: an answer, stored, with the work undone
SigningScopeUnknown             raised by your resolver: there are no credentials for this scope, for good
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Literal
from uuid import UUID

if TYPE_CHECKING:
    from oncely.effects.record import EffectRecord

__all__ = [
    "AddressRefused",
    "CancelUnsafe",
    "ClaimLost",
    "DedupKeyReused",
    "EffectFailed",
    "EffectLost",
    "EffectPending",
    "EffectUnknown",
    "InvalidKey",
    "KeyInFlight",
    "KeyInUse",
    "KeyLost",
    "KeyReused",
    "KeyUnanswered",
    "NoTransaction",
    "OncelyError",
    "PublishFailed",
    "PublisherUnavailable",
    "Refused",
    "Reject",
    "RowsHidden",
    "SealBroken",
    "SealingKeyMissing",
    "SignatureInvalid",
    "SigningScopeUnknown",
    "TableNameTaken",
    "TablesMissing",
    "TransactionEnded",
    "WebhookReused",
]


class OncelyError(Exception):
    """The root of everything that oncely raises on its own account."""


class _OfKey(OncelyError):
    def __init__(self, scope: str, key: str) -> None:
        super().__init__(scope, key)
        self.scope = scope
        self.key = key


class _OfTable(OncelyError):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class InvalidKey(OncelyError, ValueError):
    """A scope or key that PostgreSQL cannot store: NUL, an unpaired surrogate, over 1,000 bytes.

    Raised before any SQL, so the caller's transaction is untouched.
    """


class KeyReused(_OfKey):
    """The same scope and key arrived with another fingerprint: another request wears this key.

    Effects have no scope; theirs is "".
    """

    def __str__(self) -> str:
        scope = f" in scope {self.scope!r}" if self.scope else ""
        return f"key {self.key!r}{scope} was used before with another request"


class KeyInFlight(OncelyError):
    """The first caller of this key has not finished within the wait that was allowed.

    The caller's transaction is still usable. `retry_after` is a suggestion for the client.
    """

    def __init__(self, scope: str, key: str, retry_after: timedelta) -> None:
        super().__init__(scope, key, retry_after)
        self.scope = scope
        self.key = key
        self.retry_after = retry_after

    def __str__(self) -> str:
        seconds = self.retry_after.total_seconds()
        return f"key {self.key!r} in scope {self.scope!r} is in flight; try again in {seconds:g} s"


class KeyInUse(_OfKey):
    """The key was used again inside its own work, in the same transaction: it would wait for itself."""

    def __str__(self) -> str:
        return f"key {self.key!r} in scope {self.scope!r} is used inside its own work"


class KeyLost(_OfKey):
    """The key's transaction ended before the answer was stored in it: the work ended it by itself.

    So nothing is stored. An AsyncSession raises this from the `commit` that came too early; then
    nothing of the work was committed either, and the transaction goes on.
    """

    def __str__(self) -> str:
        return (
            f"the transaction of key {self.key!r} in scope {self.scope!r} may not end before the answer "
            "is stored in it; leave the commit to the caller"
        )


class KeyUnanswered(_OfKey):
    """The key was committed without an answer: its work ended the transaction by itself.

    Whether that work happened, nobody can tell, so it is not run again until somebody decides:
    `forget` makes the key free.
    """

    def __str__(self) -> str:
        return (
            f"key {self.key!r} in scope {self.scope!r} was committed without an answer; "
            "check what its work did, then forget the key"
        )


class NoTransaction(OncelyError):
    """The connection is in autocommit, where each statement commits alone and nothing is atomic."""


class TableNameTaken(_OfTable, ValueError):
    """The MetaData already has a table of this name that is not the one oncely would make."""

    def __str__(self) -> str:
        return f"the MetaData already has another table named {self.name!r}; pass table_name="


class TransactionEnded(OncelyError):
    """A message's work ended the transaction that its inbox row is in, or caught an error that spoils it."""


class TablesMissing(_OfTable):
    """The database lacks the table `name` or one that belongs to it: the migration has not run there."""

    def __str__(self) -> str:
        return (
            f"table {self.name!r}, or one that belongs to it, does not exist in this database; "
            "run your migrations (alembic upgrade head)"
        )


class RowsHidden(_OfTable):
    """A row of table `name` is in the way and is not to be seen: row level security, or a trigger."""

    def __str__(self) -> str:
        return (
            f"table {self.name!r} neither took the row nor shows the one that is in its way; "
            "this role must see all rows, and no trigger may drop one"
        )


class DedupKeyReused(OncelyError):
    """`dedup_key` was used for this topic before, with another key or payload.

    `event_id` is the event that has it.
    """

    def __init__(self, topic: str, dedup_key: str, event_id: UUID) -> None:
        super().__init__(topic, dedup_key, event_id)
        self.topic = topic
        self.dedup_key = dedup_key
        self.event_id = event_id

    def __str__(self) -> str:
        return (
            f"dedup_key {self.dedup_key!r} of topic {self.topic!r} belongs to event "
            f"{self.event_id}, which has another key or payload"
        )


class CancelUnsafe(OncelyError):
    """`cancel` was called above READ COMMITTED, where it would decide on an old snapshot."""


class ClaimLost(OncelyError):
    """A batch was published for longer than its lease: nothing was marked, and it will be sent again.

    `event_ids` are the events that will leave twice. Give a longer lease or a smaller batch.
    """

    def __init__(self, event_ids: Iterable[UUID]) -> None:
        self.event_ids = tuple(event_ids)
        super().__init__(self.event_ids)

    def __str__(self) -> str:
        return f"the claim on {len(self.event_ids)} events had expired before they were marked as published"


class PublishFailed(OncelyError):
    """Raised by a publisher that sent a part of its batch: `failures` maps event ids to errors.

    Events that are not named in `failures` count as sent, except those in `unsent`, which were
    not tried (they come after a failed event of their key). When it names no event of the batch, or
    others, nothing counts as sent. Raises TypeError for what is not an event's id.
    """

    def __init__(self, failures: Mapping[UUID, Exception], unsent: Iterable[UUID] = ()) -> None:
        self.failures = dict(failures)
        self.unsent = frozenset(unsent)
        for event_id in (*self.failures, *self.unsent):
            if not isinstance(event_id, UUID):
                raise TypeError(f"PublishFailed names events by their id, a UUID, not by {event_id!r}")
        super().__init__(self.failures, self.unsent)

    def __str__(self) -> str:
        named = ", ".join(f"{event}: {error!r}" for event, error in list(self.failures.items())[:3])
        more = f" and {len(self.failures) - 3} more" if len(self.failures) > 3 else ""
        return f"{len(self.failures)} events were not published ({named}{more})"


class PublisherUnavailable(OncelyError):
    """Raised by a publisher whose broker cannot be reached: no event of the batch is to blame."""


class EffectPending(OncelyError):
    """Another owner is making this call and has not finished. `expires_at` is when it counts as unknown."""

    def __init__(self, key: str, expires_at: datetime | None = None) -> None:
        super().__init__(key, expires_at)
        self.key = key
        self.expires_at = expires_at

    def __str__(self) -> str:
        return f"effect {self.key!r} is being made by another owner"


class EffectUnknown(OncelyError):
    """The call may or may not have happened. It is not made again until somebody decides.

    `record` is what is known of it: the provider's token to ask by, the last error, the times. It
    is None when the database could not be reached to record the end of a call that was made.
    """

    def __init__(self, key: str, record: EffectRecord | None = None) -> None:
        super().__init__(key, record)
        self.key = key
        self.record = record

    def __str__(self) -> str:
        return f"the outcome of effect {self.key!r} is unknown; verify it or resolve it by hand"


class EffectFailed(OncelyError):
    """The call did not happen and is known not to have.

    Raised by your call, with any arguments, and by oncely on every later run of the same key, then
    with the stored message and the `record`.
    """

    def __init__(self, *args: object, record: EffectRecord | None = None) -> None:
        super().__init__(*args)
        self.record = record


class EffectLost(OncelyError):
    """This owner's claim ended before it could record how its call ended: do not trust this attempt.

    `record` is what the database said then (None: nothing, or it was not asked); whoever holds it
    decides. `result` is what this owner's call had returned, if it had: the effect may exist.
    """

    def __init__(self, key: str, record: EffectRecord | None = None, result: object = None) -> None:
        super().__init__(key, record, result)
        self.key = key
        self.record = record
        self.result = result

    def __str__(self) -> str:
        return f"the claim on effect {self.key!r} was lost before its end could be recorded"


class WebhookReused(OncelyError):
    """The same caller, account, URL, type and key arrived with another body, headers or signing scope.

    `webhook_id` is the webhook that has the key.
    """

    def __init__(self, key: str, webhook_id: UUID) -> None:
        super().__init__(key, webhook_id)
        self.key = key
        self.webhook_id = webhook_id

    def __str__(self) -> str:
        return f"key {self.key!r} belongs to webhook {self.webhook_id}, which has other content"


class SealingKeyMissing(OncelyError):
    """The keyring lacks the key that a webhook was sealed with. It opens when the key is back."""

    def __init__(self, key_id: str) -> None:
        super().__init__(key_id)
        self.key_id = key_id

    def __str__(self) -> str:
        return f"the keyring has no key {self.key_id!r}"


class SealBroken(OncelyError):
    """A sealed webhook does not open with its key: it was changed, or moved to another row or routing."""


class AddressRefused(OncelyError):
    """A webhook's host is at an address that is not public. Nothing was sent; no connection was made."""


class SignatureInvalid(OncelyError):
    """A webhook that came in cannot be trusted. `reason` is a code word; nothing of the message is in it.

    "missing": a header that is needed is not there, or is there twice. "malformed": one cannot be
    read. "untimely": it was signed too long ago, or in the future. "mismatch": no key that is trusted
    made this signature over this message.
    """

    def __init__(self, reason: Literal["missing", "malformed", "untimely", "mismatch"]) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the signature is not valid: {self.reason}"


class Reject(Exception):
    """Raise it from a publisher or a handler for what no retry can mend: a dead letter at once."""


class SigningScopeUnknown(Exception):
    """Raise it from the resolver of a webhook worker: this scope has no credentials and never will."""


class Refused(Exception):
    """Raise it from the work of a key: a deliberate answer. The work is undone, the answer kept."""

    def __init__(
        self,
        status: int,
        body: str | bytes | None = None,
        headers: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    ) -> None:
        pairs: Iterable[tuple[str, str]] = headers.items() if isinstance(headers, Mapping) else headers
        self.status = status
        self.body = body
        try:
            self.headers: tuple[tuple[str, str], ...] = tuple((name, value) for name, value in pairs)
        except (TypeError, ValueError):
            raise TypeError(f"headers must be pairs of str, not {headers!r}") from None
        super().__init__(status, body, self.headers)

    def __str__(self) -> str:
        return f"refused with status {self.status}"
