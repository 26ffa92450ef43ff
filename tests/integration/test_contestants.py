"""The contestants of the benchmark that need nothing but what the tests have: they do what they are told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oncely.testing import EmbeddedPostgres, EmbeddedValkey
from tests.benchmarks import peers
from tests.benchmarks.ratio import Servers


@pytest.mark.parametrize("peer", [peers.OURS, peers.BARE], ids=lambda peer: peer.adapter)
async def test_a_contestant_drains_and_emits_what_it_is_told(
    peer: peers.Peer, postgres: EmbeddedPostgres, valkey: EmbeddedValkey
) -> None:
    async with peers.running(peer, Path(sys.executable), Servers(postgres, valkey)) as contestant:
        rates = [await contestant.rate("emit", 20), await contestant.rate("drain", 100)]
    assert [rate > 0 for rate in rates] == [True, True]
