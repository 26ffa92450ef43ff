"""Calls to the outside that no transaction can undo: made once, or known to be in doubt.

    effects.run ─▶ record ┃table┃ ◀─ the next run, a verifier, a person

A call is made by whoever holds the record's token. `run.py` decides, `heartbeat.py` keeps the claim
alive meanwhile, `table_store.py` writes. Read `store.py` first: it says what may become of a record.
"""

from oncely.effects.effects import Effects
from oncely.effects.once import Once
from oncely.effects.record import NOT_HAPPENED, EffectRecord, EffectStats, NotHappened, Status
from oncely.effects.run import Call, TokenVerify, Verify
from oncely.effects.store import Store

__all__ = [
    "NOT_HAPPENED",
    "Call",
    "EffectRecord",
    "EffectStats",
    "Effects",
    "NotHappened",
    "Once",
    "Status",
    "Store",
    "TokenVerify",
    "Verify",
]
