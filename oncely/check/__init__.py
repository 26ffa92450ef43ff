"""Checks: what is wrong, or could be better, with a database and with settings, before it hurts.

    schema.py       the tables that are there against those of the code
    horizon.py      who keeps PostgreSQL from cleaning up behind a queue
    upkeep.py       what autovacuum was told about the tables
    deadletters.py  dead letters that are older than what an inbox remembers
    settings.py     settings that contradict each other, with the arithmetic

    finding.py      what a check has to say
    location.py     where a connection finds a table, and its name to paste
    kind.py         what an object is whose class needs an extra
    length.py       a length of time, spelled as a person reads it

Each check looks and changes nothing; it returns a Finding for whatever it has to say.
"""

from oncely.check.deadletters import check_dead_events, check_dead_letters
from oncely.check.finding import Finding
from oncely.check.horizon import check_horizon
from oncely.check.schema import check_schema
from oncely.check.settings import check_settings
from oncely.check.upkeep import check_upkeep

__all__ = [
    "Finding",
    "check_dead_events",
    "check_dead_letters",
    "check_horizon",
    "check_schema",
    "check_settings",
    "check_upkeep",
]
