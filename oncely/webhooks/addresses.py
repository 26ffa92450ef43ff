"""Which addresses a webhook may be sent to, and how a name becomes addresses.

An endpoint's name is the customer's: it may lead to this machine, this network, the cloud's metadata
service, and it may lead somewhere else at every look-up. So it is looked up once, every address is
checked, and the connection goes to an address that was checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias

__all__ = ["Lookup", "SystemLookup", "is_public"]

Lookup: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host, best first, as text. It raises OSError when there are none for now."""


def is_public(address: str) -> bool:
    """Whether this is the address of somebody else's machine on the Internet, written plainly.

    Not so: private, loopback, link-local, shared, multicast, reserved and documentation ranges, the
    unspecified address, the clouds' metadata services, and IPv6 addresses that embed an IPv4 address
    (mapped, compatible, translated, 6to4, Teredo, ISATAP), whatever that one is: who translates them,
    and to what, is not known here. Nor is what is no address at all.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv4Address):
        return parsed.is_global and not any(parsed in network for network in _NOT_PUBLIC_4)
    return (
        parsed.scope_id is None
        and parsed in _UNICAST_6
        and not any(parsed in network for network in _NOT_PUBLIC_6)
        and not _is_isatap(parsed)
    )


class SystemLookup:
    """Looks a name up as the system does, once for all who ask for it at the same time.

    Each look-up has a thread of its own: the system's function cannot be cancelled, and one name
    whose server does not answer must not keep the others waiting for a thread.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[str, int], asyncio.Future[list[str] | Exception]] = {}

    async def __call__(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        future = self._running.get((host, port))
        if future is None or future.get_loop() is not loop:
            future = self._start(loop, host, port)
        found = await asyncio.shield(future)  # it is others' too
        if isinstance(found, Exception):
            raise found
        return found

    def _start(
        self, loop: asyncio.AbstractEventLoop, host: str, port: int
    ) -> asyncio.Future[list[str] | Exception]:
        future: asyncio.Future[list[str] | Exception] = loop.create_future()

        def end(found: list[str] | Exception) -> None:
            if self._running.get((host, port)) is future:
                del self._running[host, port]
            if not future.done():
                future.set_result(found)

        def work() -> None:
            found = _look_up(host, port)
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(end, found)

        threading.Thread(target=work, name="oncely-lookup", daemon=True).start()
        self._running[host, port] = future  # not before: a thread that did not start ends nothing
        return future


def _look_up(host: str, port: int) -> list[str] | Exception:
    try:
        # As bytes: text would be encoded by rules that fail in ways of their own.
        found = socket.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM)
    except Exception as error:  # noqa: BLE001  raised where it is waited for; here nobody would see it
        return error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _is_isatap(address: IPv6Address) -> bool:
    return (int(address) >> 32) & 0xFDFF_FFFF == 0x0000_5EFE


_NOT_PUBLIC_4 = [
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # a cloud's own services, at an address that looks public
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
]
"""Said in full: what the standard library calls global differs from release to release."""

_UNICAST_6 = IPv6Network("2000::/3")
"""All that was ever given out. Mapped, translated, unique local and link-local ones lie outside."""

_NOT_PUBLIC_6 = [
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",
        "2002::/16",  # 6to4
        "2620:4f:8000::/48",
        "3fff::/20",
    )
]
