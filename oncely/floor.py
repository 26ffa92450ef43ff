"""Floor: from where a ledger scans the line, so that it does not read again what is behind it.

Rows that were published stay in the index while a long transaction keeps them visible. So each ledger
remembers a position below which no event will ever be ready again. An event may still appear below a
position that was seen, when its transaction took its place in line and has not committed. Hence two
rules: a transaction that emits has its transaction id before it takes a place (see `emission`), and the
floor rises only to a position that was seen by an earlier claim whose own transaction id is older than
every transaction that still runs. `pg_snapshot_xmax` would not do: it is one past the newest *completed*
transaction, and a running one may already have a higher id.

The detour. Events behind a held key cannot be passed by the floor, and a large backlog of them would be
read by every claim. So each ledger also remembers a position further on, and the keys of all that lies
between the two: as long as every one of them is held, the scan starts there.

All this is good only for the server process, since its last crash, and for the database and the table
files it was learnt on: the `ground`. Where one has changed, the statement takes it as zero, and it is
forgotten. It is also forgotten once a minute, so that an event which got below it by other means (sent
again by hand, inserted past `emit`, a sequence that was set back) leaves a minute late, and not never.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["Facts", "Floor"]

_MOST_DETOUR_KEYS = 1_000
_LIFETIME = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class Facts:
    """What a choosing statement saw beside the events: positions, and transaction ids."""

    ground: str
    first_claim: int
    detoured: bool
    first_ready: int | None
    last_ready: int | None
    lowest_claimed: int | None
    first_passed: int | None
    passed_keys: list[str] | None
    oldest_running: int
    transaction: int


@dataclass(slots=True)
class Floor:
    """What one ledger remembers. `first_claim` is the number below which no claim lives."""

    ground: str = ""
    learnt_at: float = 0.0
    floor: int = 0
    first_claim: int = 0
    detour: int = 0
    detour_keys: frozenset[str] = frozenset()
    # Positions seen by earlier claims, each with the transaction id of that claim, oldest first.
    _seen: deque[tuple[int, int]] = field(default_factory=deque)

    def fresh(self, now: float) -> Floor:
        """This memory, or a new one when it is older than a minute. `now` is of the monotonic clock."""
        return self if now - self.learnt_at < _LIFETIME else Floor(learnt_at=now)

    def parameters(self) -> dict[str, object]:
        """What a choosing statement is given of this."""
        return {
            "ground": self.ground,
            "floor": self.floor,
            "first_claim": self.first_claim,
            "detour": self.detour,
            "detour_keys": list(self.detour_keys),
        }

    def after(self, facts: Facts, *, keys_used: frozenset[str], trust_position: bool) -> Floor:
        """The memory after a claim that started from `keys_used`, the detour's keys of that time.

        `trust_position` is False when the transaction had its id before the choosing statement took
        its snapshot: then a writer with a higher id may have a place below what was seen.
        """
        if self.ground != facts.ground:
            return Floor(ground=facts.ground, learnt_at=self.learnt_at).after(
                facts, keys_used=frozenset(), trust_position=trust_position
            )
        self.first_claim = max(self.first_claim, facts.first_claim)
        if facts.first_ready is None or facts.last_ready is None:
            return self
        settled = 0
        while self._seen and self._seen[0][1] <= facts.oldest_running:
            settled = self._seen.popleft()[0]
        if trust_position:
            highest = self._seen[-1][0] if self._seen else 0
            self._seen.append((max(highest, facts.last_ready), facts.transaction))
        beyond = min(settled, facts.first_ready, facts.lowest_claimed or facts.first_ready)
        keys = frozenset(facts.passed_keys or ())
        if facts.detoured:
            keys |= keys_used
        else:
            self.floor = max(self.floor, min(beyond, facts.first_passed or beyond))
        if beyond > self.floor and len(keys) <= _MOST_DETOUR_KEYS:
            self.detour, self.detour_keys = beyond, keys
        return self
