"""Effects, as far as no database is needed: what is refused before any SQL, and how time is said."""

from __future__ import annotations

import asyncio
import pickle
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import MetaData, select
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import CompileError

from oncely import NOT_HAPPENED, Effects, InvalidKey, TableNameTaken
from oncely.effects import EffectRecord, Status
from oncely.effects.clock import database_now
from oncely.effects.run import _failure, _hash
from oncely.errors import EffectFailed, EffectLost, EffectPending, EffectUnknown, KeyReused
from oncely.storable import encode_json

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def unbound(**options: Any) -> Effects:
    """Effects on no database: whatever reaches for one is a RuntimeError."""
    return Effects(MetaData(), stale_after=timedelta(minutes=1), **options)


async def call(provider_token: str) -> object:
    raise AssertionError("the call must not be made")


def record(**changes: Any) -> EffectRecord:
    facts: dict[str, Any] = {
        "key": "k",
        "args_hash": b"",
        "status": Status.FAILED,
        "result_json": None,
        "error": "",
        "token": "t",
        "provider_token": "p",
        "attempts": 1,
        "created_at": NOON,
        "updated_at": NOON,
        "expires_at": None,
        "expired": False,
    }
    return EffectRecord(**(facts | changes))


@pytest.mark.parametrize("key", ["nul\0", "\ud800", "k" * 1_001, "é" * 501, 7, None])
async def test_a_key_that_cannot_be_stored_is_refused_before_any_sql(key: Any) -> None:
    effects = unbound()
    for using in (
        effects.run(key, call),
        effects.get(key),
        effects.delete(key),
        effects.claim(key, b""),
        effects.extend(key, "t", timedelta(1)),
        effects.finish(key, "t", Status.DONE),
    ):
        with pytest.raises(InvalidKey):
            await using


@pytest.mark.parametrize(
    "args",
    [b"bytes", float("nan"), {"a": [1, {2, 3}]}, "nul\0", datetime(2026, 1, 1), object()],  # noqa: DTZ001
)
async def test_args_that_are_no_json_are_refused_before_any_sql(args: Any) -> None:
    with pytest.raises(ValueError, match="args"):
        await unbound().run("k", call, args=args)


@pytest.mark.parametrize("ttl", [timedelta(0), timedelta(seconds=-1), timedelta.max])
async def test_a_ttl_that_frees_nothing_or_never_is_refused_before_any_sql(ttl: timedelta) -> None:
    effects = unbound()
    for using in (
        effects.run("k", call, ttl=ttl),
        effects.finish("k", "t", Status.DONE, ttl=ttl),
        effects.take(record(status=Status.UNKNOWN), Status.DONE, ttl=ttl),
    ):
        with pytest.raises(ValueError, match="ttl"):
            await using


async def test_a_negative_wait_is_refused() -> None:
    with pytest.raises(ValueError, match="wait"):
        await unbound().run("k", call, wait=timedelta(seconds=-1))


@pytest.mark.parametrize("stale_after", [timedelta(0), timedelta(seconds=-1), timedelta.max])
def test_stale_after_must_be_a_time_that_can_pass(stale_after: timedelta) -> None:
    with pytest.raises(ValueError, match="stale_after"):
        Effects(MetaData(), stale_after=stale_after)


async def test_a_lease_that_has_ended_already_is_refused() -> None:
    with pytest.raises(ValueError, match="lease"):
        await unbound().extend("k", "t", timedelta(0))


def test_failed_on_takes_exceptions_only() -> None:
    with pytest.raises(TypeError, match="CancelledError"):
        unbound(failed_on=(asyncio.CancelledError,))


def test_failed_on_may_be_a_list() -> None:
    assert unbound(failed_on=[OSError])._policy.failed_on == (EffectFailed, OSError)


async def test_a_call_does_not_end_as_pending() -> None:
    with pytest.raises(ValueError, match="pending"):
        await unbound().finish("k", "t", Status.PENDING)


@pytest.mark.parametrize(
    ("status", "end"),
    [
        (Status.FAILED, {"result": 1}),
        (Status.UNKNOWN, {"result": 1}),
        (Status.DONE, {"error": "why"}),
        (Status.UNKNOWN, {"ttl": timedelta(1)}),
        (Status.DONE, {"result": b"bytes"}),
    ],
)
async def test_an_end_that_contradicts_itself_is_refused_before_any_sql(
    status: Status, end: dict[str, Any]
) -> None:
    with pytest.raises(ValueError):
        await unbound().finish("k", "t", status, **end)
    with pytest.raises(ValueError):
        await unbound().take(record(status=Status.UNKNOWN), status, **end)


@pytest.mark.parametrize("statuses", [[Status.PENDING], ["unknown"], list(Status)])
async def test_open_records_cannot_be_purged(statuses: Any) -> None:
    with pytest.raises(ValueError, match="only finished"):
        await unbound().purge(0, statuses)


async def test_a_negative_age_is_refused() -> None:
    with pytest.raises(ValueError, match="older_than"):
        await unbound().purge(-1)


async def test_without_a_database_the_error_says_so() -> None:
    with pytest.raises(RuntimeError, match="sessionmaker"):
        await unbound().run("k", call)


def test_making_effects_twice_on_one_metadata_gives_the_same_table() -> None:
    metadata = MetaData()
    first = Effects(metadata, stale_after=timedelta(1))
    assert Effects(metadata, stale_after=timedelta(2)).table is first.table
    assert Effects(metadata, stale_after=timedelta(2), table_name="others").table is not first.table


def test_another_table_of_that_name_is_refused() -> None:
    from oncely import Outbox

    metadata = MetaData()
    Outbox(metadata, table_name="effects")
    with pytest.raises(TableNameTaken):
        Effects(metadata, stale_after=timedelta(1))


def test_the_hash_of_args_knows_no_order_of_keys_and_no_tuples() -> None:
    assert _hash({"a": 1, "b": {"c": 2, "d": (3,)}}) == _hash({"b": {"d": [3], "c": 2}, "a": 1})


@pytest.mark.parametrize(
    ("one", "other"),
    [(None, {}), (1, "1"), (1, 1.0), ([1, 2], [2, 1]), ({"a": 1}, {"a": 2}), ("é", "e\u0301")],
)
def test_other_args_have_another_hash(one: object, other: object) -> None:
    assert _hash(one) != _hash(other)


def test_a_decimal_counts_as_its_text() -> None:
    assert _hash(Decimal("1.10")) == _hash("1.10") != _hash(Decimal("1.1"))


def test_not_happened_cannot_be_stored_as_a_result() -> None:
    with pytest.raises(ValueError, match="result"):
        encode_json(NOT_HAPPENED, what="result")
    assert repr(NOT_HAPPENED).startswith("<NotHappened.NOT_HAPPENED")


@pytest.mark.parametrize(
    ("stored", "raised"),
    [
        ("EffectFailed: card declined", ("card declined",)),
        ("EffectFailed: a: b", ("a: b",)),
        ("EffectFailed", ()),
        ("", ()),
        ("CardDeclined: no funds", ("CardDeclined: no funds",)),
        ("CardDeclined", ("CardDeclined",)),
    ],
)
def test_a_replayed_failure_says_what_the_first_one_said(stored: str, raised: tuple[str, ...]) -> None:
    failed = record(error=stored)
    error = _failure(failed)
    assert (error.args, error.record) == (raised, failed)


def test_errors_survive_pickling() -> None:
    one = record(status=Status.UNKNOWN)
    for error, facts in (
        (EffectFailed("declined", record=one), ["record"]),
        (EffectUnknown("k", one), ["key", "record"]),
        (EffectLost("k", one, {"charge": 1}), ["key", "record", "result"]),
        (EffectPending("k", NOON), ["key", "expires_at"]),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert (again.args, str(again)) == (error.args, str(error))
        assert [getattr(again, fact) for fact in facts] == [getattr(error, fact) for fact in facts]


def test_an_effects_key_reused_speaks_of_no_scope() -> None:
    assert str(KeyReused("", "k")) == "key 'k' was used before with another request"


def test_a_records_repr_shows_neither_result_nor_args() -> None:
    shown = repr(record(status=Status.DONE, result_json='{"card":"4242"}', args_hash=b"secret"))
    assert "4242" not in shown
    assert "secret" not in shown


def test_the_databases_time_is_said_as_each_database_understands_it() -> None:
    now, later = select(database_now()), select(database_now(timedelta(seconds=1.5)))
    on_postgresql = postgresql.dialect()  # type: ignore[no-untyped-call]  # so in SQLAlchemy
    assert "clock_timestamp()" in str(now.compile(dialect=on_postgresql))
    assert "clock_timestamp() + %(param_1)s" in str(later.compile(dialect=on_postgresql))
    on_sqlite = later.compile(dialect=sqlite.dialect())
    assert "strftime('%Y-%m-%d %H:%M:%f000', 'now', ?)" in str(on_sqlite)
    bind = on_sqlite.binds["param_1"]
    process = bind.type.dialect_impl(sqlite.dialect()).bind_processor(sqlite.dialect())
    assert process is not None
    assert process(bind.value) == "+1.500 seconds"


def test_the_databases_time_is_said_to_no_other_database() -> None:
    with pytest.raises(CompileError, match="not on mysql"):
        select(database_now()).compile(dialect=mysql.dialect())
