"""The way out: where it connects to, what it sends, and how long it listens. Real TLS on this machine."""

from __future__ import annotations

import asyncio
import gzip
import logging
import ssl
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import h11
import httpx
import pytest

from oncely.errors import AddressRefused
from oncely.webhooks import PinnedTransport, PrivateAddressesAllowed, WebhookSender
from oncely.webhooks.sealing import Content
from oncely.webhooks.sending import Reply
from oncely.webhooks.transport import PinnedConnection
from tests.waiting import until
from tests.webhooks import Answer, Endpoint, Received, authority_file, endpoint, sender, trusting

ID = UUID(int=1)
SHORT = timedelta(milliseconds=400)


class Attempt:
    """Notes what the sender asks and tells."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.reply: Reply | None = None
        self.confirmed = False

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def confirm(self) -> None:
        self.confirmed = True
        if self.refusal is not None:
            raise self.refusal

    def answered(self, reply: Reply) -> None:
        self.reply = reply


async def post(sender: WebhookSender, url: str, body: bytes = b"{}", attempt: Attempt | None = None) -> Reply:
    return await sender.send(ID, Content(url, (("X-One", "1"), ("X-One", "2")), body), attempt or Attempt())


async def test_what_is_sent_is_what_was_said(server: Endpoint) -> None:
    target = "/a%7eb//c/../d'e'?x='y'&&z=%2f|"[:-1]
    reply = await post(sender(server), server.url(target), b"\x00\xff\r\n")
    assert reply == Reply(204)
    [received] = server.requests
    assert (received.method, received.target, received.body) == ("POST", target, b"\x00\xff\r\n")
    assert received.headers["host"] == f"hooks.example.com:{server.port}"
    assert received.headers["content-length"] == "4"
    assert received.headers["connection"] == "close"
    assert [value for name, value in received.raw_headers if name == "x-one"] == ["1", "2"]
    assert "transfer-encoding" not in received.headers
    assert "cookie" not in received.headers


async def test_an_empty_body_is_sent_as_one(server: Endpoint) -> None:
    await post(sender(server), server.url(), b"")
    assert (server.requests[0].headers["content-length"], server.requests[0].body) == ("0", b"")


async def test_a_name_is_looked_up_once_and_the_connection_goes_to_what_was_checked(server: Endpoint) -> None:
    answers = iter([["127.0.0.1"], ["169.254.169.254"]])
    asked = []

    async def lookup(host: str, port: int) -> Sequence[str]:
        asked.append((host, port))
        return next(answers)

    await post(sender(server, lookup=lookup), server.url())
    assert asked == [("hooks.example.com", server.port)]
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["::1"],
        ["0.0.0.0"],
        ["::ffff:127.0.0.1"],
        ["169.254.169.254"],
        ["10.0.0.1"],
        ["1.1.1.1", "127.0.0.1"],
        ["2130706433"],
        ["localhost"],
    ],
)
async def test_no_connection_is_made_when_any_address_is_not_public(
    server: Endpoint, addresses: list[str]
) -> None:
    async def lookup(host: str, port: int) -> Sequence[str]:
        return addresses

    attempt = Attempt()
    with pytest.raises(AddressRefused):
        await post(sender(server, lookup=lookup, allow_private=False), server.url(), attempt=attempt)
    assert (server.connections, attempt.confirmed) == (0, False)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]"],
)
async def test_numbers_in_the_address_are_checked_as_the_system_reads_them(
    server: Endpoint, host: str
) -> None:
    transport = PinnedTransport(ssl_context=trusting())
    with pytest.raises(AddressRefused):
        await post(WebhookSender(sender(server).signer, transport=transport), server.url(host=host))
    assert server.connections == 0


async def test_the_certificate_must_be_the_names() -> None:
    async with endpoint(names=("a.example.com",)) as server:
        both = sender(server)
        assert await post(both, server.url(host="a.example.com")) == Reply(204)
        # Same address, same port, right after: a kept connection would be a's.
        with pytest.raises(httpx.ConnectError) as refused:
            await post(both, server.url(host="b.example.com"))
        assert isinstance(refused.value.__cause__, ssl.SSLCertVerificationError)
        assert [request.host for request in server.requests] == ["a.example.com"]


async def test_a_certificate_of_an_unknown_authority_is_refused(server: Endpoint) -> None:
    with pytest.raises(httpx.ConnectError) as refused:
        await post(sender(server, ssl_context=None), server.url())
    assert isinstance(refused.value.__cause__, ssl.SSLCertVerificationError)
    assert server.requests == []


async def test_each_request_has_a_connection_of_its_own(server: Endpoint) -> None:
    one = sender(server)
    for _ in range(3):
        await post(one, server.url())
    assert (server.connections, len(server.requests)) == (3, 3)


async def test_a_redirect_is_an_answer_and_is_not_followed(server: Endpoint) -> None:
    async with endpoint() as inner:
        server.answer = Answer(302, [("location", inner.url("/metadata", host="127.0.0.1"))])
        assert await post(sender(server), server.url()) == Reply(302)
        assert (inner.connections, server.connections) == (0, 1)


async def test_a_proxy_in_the_environment_is_not_used(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with endpoint() as proxy:
        for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert await post(sender(server), server.url()) == Reply(204)
        assert proxy.connections == 0


async def test_an_authority_in_the_environment_is_not_trusted(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority_file(tmp_path)))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    with pytest.raises(httpx.ConnectError) as refused:
        await post(sender(server, ssl_context=None), server.url())
    assert isinstance(refused.value.__cause__, ssl.SSLCertVerificationError)


async def test_a_certificate_of_yesterday_is_refused() -> None:
    async with endpoint(not_after=datetime.now(UTC) - timedelta(days=1)) as server:
        with pytest.raises(httpx.ConnectError) as refused:
            await post(sender(server), server.url())
        assert isinstance(refused.value.__cause__, ssl.SSLCertVerificationError)
        assert server.requests == []


async def test_an_address_that_refuses_is_passed_over(server: Endpoint) -> None:
    async def lookup(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.2", "127.0.0.1"]

    assert await post(sender(server, lookup=lookup), server.url()) == Reply(204)


async def test_an_address_that_says_nothing_leaves_time_for_the_next(server: Endpoint) -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(listen, "127.0.0.2", server.port)

    async def lookup(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.2", "127.0.0.1"]

    async with silent:
        deadline = timedelta(seconds=2)
        assert await post(sender(server, lookup=lookup, deadline=deadline), server.url()) == Reply(204)


async def test_a_lookup_that_hangs_fails_and_has_the_deadline() -> None:
    async with endpoint() as server:

        async def lookup(host: str, port: int) -> Sequence[str]:
            await asyncio.Event().wait()
            return []

        with pytest.raises(httpx.ConnectTimeout):
            await post(sender(server, lookup=lookup, deadline=SHORT), server.url())

        async def nothing(host: str, port: int) -> Sequence[str]:
            return []

        with pytest.raises(httpx.ConnectError):
            await post(sender(server, lookup=nothing), server.url())


async def test_nothing_is_sent_when_the_last_word_is_no(server: Endpoint) -> None:
    class No(Exception):
        pass

    attempt = Attempt(refusal=No())
    with pytest.raises(No):
        await post(sender(server), server.url(), attempt=attempt)

    async def connected() -> bool:
        return server.connections == 1

    await until(connected)
    assert (server.requests, attempt.reply) == ([], None)


async def drip(received: Received, writer: asyncio.StreamWriter) -> None:
    """Answers one byte at a time, for ever."""
    for byte in b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)


async def drip_body(received: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    for _ in range(100_000):
        writer.write(b"y")
        await writer.drain()
        await asyncio.sleep(0.02)


async def silence(received: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("script", [drip, silence])
async def test_the_deadline_is_for_all_of_it(server: Endpoint, script: object) -> None:
    server.script = script  # type: ignore[assignment]  # one of the two
    begun = time.monotonic()
    attempt = Attempt()
    with pytest.raises(httpx.ReadTimeout):
        await post(sender(server, deadline=SHORT), server.url(), attempt=attempt)
    assert time.monotonic() - begun < 2.5
    assert attempt.reply is None


async def test_an_answer_whose_body_never_ends_has_been_given(server: Endpoint) -> None:
    server.script = drip_body
    begun = time.monotonic()
    assert await post(sender(server, deadline=SHORT), server.url()) == Reply(200)
    assert time.monotonic() - begun < 2.5


async def test_of_an_endless_body_little_is_read(server: Endpoint) -> None:
    sent = 0

    async def flood(received: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n")
        while True:
            writer.write(b"y" * 65_536)
            await writer.drain()
            sent += 65_536

    server.script = flood
    assert await post(sender(server), server.url()) == Reply(200)
    assert sent < 20_000_000  # what fits into the buffers in between


async def test_a_compressed_answer_stays_compressed(server: Endpoint) -> None:
    bomb = gzip.compress(b"\0" * 10_000_000)
    server.answer = Answer(200, [("content-encoding", "gzip")], bomb)
    assert await post(sender(server), server.url()) == Reply(200)
    assert server.requests[0].headers["accept-encoding"] == "identity"


async def test_endless_headers_are_no_answer(server: Endpoint) -> None:
    async def headers(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x: " + b"y" * 1_000 + b"\r\n")
            await writer.drain()

    server.script = headers
    with pytest.raises(httpx.RemoteProtocolError):
        await post(sender(server), server.url())


async def say(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200",
        b"HTTP/1.1 101 .\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_no_answer(server: Endpoint, data: bytes) -> None:
    server.script = lambda received, writer: say(writer, data)
    attempt = Attempt()
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        await post(sender(server), server.url(), attempt=attempt)
    assert attempt.reply is None


async def test_what_comes_before_the_answer_is_passed_over(server: Endpoint) -> None:
    data = (
        b"HTTP/1.1 100 .\r\n\r\nHTTP/1.1 103 .\r\nlink: </x>\r\n\r\nHTTP/1.1 503 .\r\nretry-after: 7\r\n\r\n"
    )
    server.script = lambda received, writer: say(writer, data)
    assert await post(sender(server), server.url()) == Reply(503, timedelta(seconds=7))


async def test_what_comes_before_the_answer_without_an_end_is_no_answer(server: Endpoint) -> None:
    """Every one of them costs time that the other endpoints need."""

    async def storm(received: Received, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b"HTTP/1.1 100 .\r\n\r\n" * 1_000)
            await writer.drain()

    server.script = storm
    with pytest.raises(httpx.RemoteProtocolError):
        await post(sender(server), server.url())


async def test_an_answer_in_tiny_pieces_is_not_read_for_long(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[h11.Event] = []
    next_event = PinnedConnection.next_event

    async def counted(connection: PinnedConnection) -> h11.Event:
        read.append(await next_event(connection))
        return read[-1]

    monkeypatch.setattr(PinnedConnection, "next_event", counted)
    head = b"HTTP/1.1 200 .\r\ntransfer-encoding: chunked\r\n\r\n"
    server.script = lambda received, writer: say(writer, head + b"1\r\nx\r\n" * 16_384)
    assert await post(sender(server), server.url()) == Reply(200)
    assert len(read) == 1 + 64


async def test_a_name_that_only_looks_international_is_sent_to(server: Endpoint) -> None:
    """A snowman is no letter to IDNA 2008, but there are such names."""
    assert await post(sender(server), server.url(host="xn--n3h.example.com")) == Reply(204)
    assert [request.host for request in server.requests] == ["xn--n3h.example.com"]


async def test_nothing_is_sent_when_the_deadline_passes_before_the_last_word(server: Endpoint) -> None:
    class Slow(Attempt):
        async def confirm(self) -> None:
            await asyncio.sleep(0.5)

    with pytest.raises(httpx.WriteTimeout):
        await post(sender(server, deadline=timedelta(seconds=0.4)), server.url(), attempt=Slow())
    assert server.requests == []


async def test_an_answer_before_the_request_was_read_counts() -> None:
    """The endpoint reads the head, says 413, and leaves the body lying."""
    async with endpoint() as server:
        answered = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 .\r\ncontent-length: 0\r\n\r\n")
            try:
                await answered.wait()
            finally:
                writer.transport.abort()

        server.serve = serve  # type: ignore[method-assign]  # another kind of server
        attempt = Attempt()
        try:
            assert await post(sender(server), server.url(), b"x" * 12_000_000, attempt) == Reply(413)
        finally:
            answered.set()


async def test_private_addresses_are_allowed_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.warns(PrivateAddressesAllowed, match="For tests only"):
        PinnedTransport(allow_private=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "may reach into this network" in caplog.text


async def test_an_application_looks_at_an_endpoint_under_the_same_rules(server: Endpoint) -> None:
    server.answer = Answer(200, [], b"hello")
    async with httpx.AsyncClient(transport=server.transport(), trust_env=False) as client:
        answer = await client.get(server.url("/challenge?x=1"))
        assert (answer.status_code, answer.text) == (200, "hello")
        with pytest.raises(httpx.UnsupportedProtocol):
            await client.get("http://hooks.example.com/")
    async with httpx.AsyncClient(transport=PinnedTransport(), trust_env=False) as client:
        with pytest.raises(AddressRefused):
            await client.get(server.url(host="127.0.0.1"))
    assert [request.target for request in server.requests] == ["/challenge?x=1"]


def test_a_deadline_is_positive() -> None:
    with pytest.raises(ValueError, match="deadline must be positive"):
        PinnedTransport(deadline=timedelta(0))
