"""Which addresses are somebody else's machine on the Internet; and how the system is asked for them."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from oncely.webhooks import is_public
from oncely.webhooks.addresses import SystemLookup


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "8.8.8.8", "93.184.215.14", "172.15.0.1", "172.32.0.1", "100.63.255.255", "100.128.0.1",
     "192.0.1.1", "192.167.0.1", "223.255.255.255", "2606:4700:4700::1111", "2a00:1450:4001::8a",
     "2001:4860:4860::8888", "2400:cb00::1"],
)  # fmt: skip
def test_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        # this machine, this network, nobody
        "127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255",
        "192.168.1.1", "169.254.1.1", "100.64.0.1", "100.127.255.255", "::", "::1", "fc00::1", "fdff::1",
        "fe80::1", "fe80::1%eth0", "febf::1", "fec0::1",
        # many, and all
        "224.0.0.1", "239.255.255.255", "255.255.255.255", "240.0.0.1", "ff02::1", "ff0e::1",
        # metadata services
        "169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16",
        # documentation, benchmarks, assignments
        "192.0.2.1", "198.51.100.1", "203.0.113.1", "198.18.0.1", "192.0.0.8", "192.88.99.1",
        "2001:db8::1", "3fff::1", "100::1", "5f00::1", "2001:2::1", "2001:20::1",
        # an IPv4 address inside, public ones too: mapped, compatible, translated, 6to4, Teredo, ISATAP
        "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1", "::127.0.0.1", "::8.8.8.8",
        "64:ff9b::7f00:1", "64:ff9b::8.8.8.8", "64:ff9b:1::a00:1", "2002:7f00:1::", "2002:808:808::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2606:4700::5efe:10.0.0.1", "2606:4700::200:5efe:a00:1",
        # no address, or written as no resolver writes it
        "", "localhost", "2130706433", "0x7f.1", "127.1", "0177.0.0.1", "1.2.3", "1.2.3.4.5", "8.8.8.8 ",
        "[::1]", "8.8.8.8:443",
    ],
)  # fmt: skip
def test_not_public(address: str) -> None:
    assert not is_public(address)


async def test_the_system_is_asked_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answer(host: bytes, port: int, **options: Any) -> list[Any]:
        asked.append((host, port, options))
        return [
            (0, 0, 0, "", ("192.0.2.7", port)),
            (0, 0, 0, "", ("192.0.2.7", port)),
            (0, 0, 0, "", ("::7", 0, 0, 0)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    assert await SystemLookup()("a.example", 443) == ["192.0.2.7", "::7"]
    assert asked == [(b"a.example", 443, {"type": socket.SOCK_STREAM})]


async def test_numbers_are_resolved_as_the_system_does() -> None:
    assert await SystemLookup()("127.0.0.1", 443) == ["127.0.0.1"]
    assert await SystemLookup()("::1", 443) == ["::1"]
    assert await SystemLookup()("2130706433", 443) == ["127.0.0.1"]


async def test_one_name_is_looked_up_once_for_all_who_ask_and_keeps_nobody_else_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hung = threading.Event()
    asked: list[bytes] = []

    def answer(host: bytes, port: int, **options: Any) -> list[Any]:
        asked.append(host)
        if host == b"slow.example":
            hung.wait(20)
        return [(0, 0, 0, "", (host.decode(), port))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    lookup = SystemLookup()
    try:
        waiting = [asyncio.ensure_future(lookup("slow.example", 443)) for _ in range(100)]
        others = await asyncio.gather(*(lookup(f"{number}.example", 443) for number in range(40)))
        assert others == [[f"{number}.example"] for number in range(40)]
        waiting[0].cancel()  # what one gives up is not taken from the others
        await asyncio.wait(waiting[:1])
        assert not any(task.done() for task in waiting[1:])
    finally:
        hung.set()
    assert await asyncio.gather(*waiting[1:]) == [["slow.example"]] * 99
    assert asked.count(b"slow.example") == 1
    await lookup("slow.example", 443)
    assert asked.count(b"slow.example") == 2


async def test_a_thread_that_does_not_start_spoils_no_later_look_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: [(0, 0, 0, "", ("192.0.2.7", port))])
    lookup = SystemLookup()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        with pytest.raises(RuntimeError):
            await lookup("a.example", 443)
    async with asyncio.timeout(5):
        assert await lookup("a.example", 443) == ["192.0.2.7"]


async def test_a_look_up_that_fails_in_another_way_is_told_of_too() -> None:
    async with asyncio.timeout(5):
        with pytest.raises(UnicodeEncodeError):
            await SystemLookup()("bücher.example", 443)


async def test_a_name_that_fails_raises_for_all_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(host: bytes, port: int, **options: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    lookup = SystemLookup()
    asked = (lookup("a.example", 443) for _ in range(3))
    failed = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in failed] == [socket.gaierror] * 3


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
