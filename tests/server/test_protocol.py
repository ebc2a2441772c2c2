"""HTTP by hand: what is no request, what never ends, what comes too slowly or all at once."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from tests.recipes import recipe_of, toy_model
from tests.server.client import Reply
from tests.server.conftest import Served, serving
from tokenflow.server import protocol
from tokenflow.server.files import Connections
from tokenflow.server.protocol import LARGEST_HEAD
from tokenflow.server.requests import MOST_VALUES
from tokenflow.server.transport import LARGEST_BODY

pytestmark = pytest.mark.anyio

BODY = json.dumps({"prompt": "ab", "max_tokens": 2}).encode()


def post(body: bytes = BODY, version: str = "1.1", *fields: str) -> bytes:
    """A request for a completion as it goes over the wire."""
    head = (f"POST /v1/completions HTTP/{version}", "host: x", f"content-length: {len(body)}", *fields)
    return "\r\n".join((*head, "", "")).encode() + body


async def answers(served: Served, data: bytes, count: int = 1) -> list[Reply]:
    """What comes back for bytes on a connection of their own."""
    async with asyncio.timeout(20), served.connect() as exchange:
        exchange.writer.write(data)
        return [await exchange.reply() for _ in range(count)]


async def refusal(served: Served, parts: Sequence[bytes]) -> tuple[int, str]:
    """Status and message of the error that bytes get, after which the connection is closed."""
    async with asyncio.timeout(20), served.connect() as exchange:
        with suppress(ConnectionError):
            for part in parts:
                exchange.writer.write(part)
                await exchange.writer.drain()
        reply = await exchange.reply()
        assert reply.headers["connection"] == "close"
        assert reply.error["type"] == "invalid_request_error"
        assert await exchange.reader.read() == b""
        return reply.status, reply.error["message"]


class Heard(protocol.Protocol):
    """A connection that starts no request."""

    def __init__(self) -> None:
        config = Config(lambda scope, receive, send: None, log_level="warning")
        config.load()
        loop = asyncio.get_running_loop()
        super().__init__(Connections(4096), lambda code: None, config, ServerState(), {}, _loop=loop)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: object) -> None:
        self._running = cycle


def heard(parts: Sequence[bytes]) -> list[bytes]:
    """The bodies of the requests that come in these reads."""

    async def hear() -> list[bytes]:
        connection = Heard()
        transport = mock.Mock(spec=asyncio.Transport)
        transport.get_extra_info.return_value = None
        connection.connection_made(transport)
        for part in parts:
            connection.data_received(part)
        transport.write.assert_not_called()
        cycles = [connection._running, *(cycle for cycle, _ in reversed(connection.pipeline))]
        connection.connection_lost(None)
        return [bytes(cycle.body) for cycle in cycles if cycle is not None and not cycle.more_body]

    return asyncio.run(hear())


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
        b"hello\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        "GET /hé HTTP/1.1\r\nhost: x\r\n\r\n".encode(),
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -3\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: a\x00b\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_an_error_like_others(pair: Served, data: bytes) -> None:
    assert await refusal(pair, [data]) == (400, "this is no HTTP request")


async def test_every_error_that_a_client_is_told_of_is_counted(pair: Served) -> None:
    async def counted() -> list[float]:
        codes = ("bad_http", "not_found")
        return [await pair.metric("request_failure_total", code=code) for code in codes]

    before = await counted()
    await refusal(pair, [b"hello\r\n\r\n"])
    await refusal(pair, [b"GET /health HTTP/1.1\r\nx: ", b"y" * 2 * LARGEST_HEAD])
    assert (await pair.get("/nope")).status == 404
    assert (await pair.get("/v1/completions")).status == 405
    assert [after - b for after, b in zip(await counted(), before, strict=True)] == [2, 2]


async def test_a_head_without_end_is_cut_off(pair: Served) -> None:
    for endless in (b"x" * 2**16, b"x: y\r\n" * 2**13):
        status, message = await refusal(pair, [b"GET /health HTTP/1.1\r\nx: ", *[endless] * 64])
        assert (status, message) == (431, f"the head of a request may have {LARGEST_HEAD} bytes")


async def test_a_head_that_comes_at_once_may_not_be_longer(pair: Served) -> None:
    for size, status in ((LARGEST_HEAD - 100, 200), (LARGEST_HEAD, 431)):
        (reply,) = await answers(pair, b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * size + b"\r\n\r\n")
        assert reply.status == status
    async with asyncio.timeout(20), pair.connect() as exchange:
        for _ in range(3):  # each message has its own head
            exchange.writer.write(b"GET /health HTTP/1.1\r\nx: " + b"y" * (LARGEST_HEAD // 2) + b"\r\n\r\n")
            assert (await exchange.reply()).status == 200


async def test_a_body_without_end_is_refused_and_then_cut_off(pair: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    async with asyncio.timeout(20), pair.connect() as exchange:
        exchange.writer.write(head)
        for _ in range(protocol.LARGEST_MESSAGE // 2**16 + 16):
            exchange.writer.write(chunk)
            await exchange.writer.drain()
        assert (await exchange.reply()).status == 413
        assert await exchange.reader.read() == b"", "it was told once"
    (reply,) = await answers(pair, head + chunk * (LARGEST_BODY // 2**16 + 1))
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")


async def test_a_client_that_is_refused_while_it_sends_gets_its_answer(pair: Served) -> None:
    """Some clients read only after they have sent everything, and close after each request."""
    for path, size, status in (
        ("/tokenize", 2**22, 413),
        ("/v1/completions", 2**24, 413),
        ("/nope", 2**22, 404),
    ):
        async with asyncio.timeout(20), pair.connect() as exchange:
            exchange.ask("POST", path, b" " * size, {"connection": "close"})
            await exchange.writer.drain()
            reply = await exchange.reply()
            assert (reply.status, reply.headers["connection"]) == (status, "close")
            assert await exchange.reader.read() == b""


async def test_a_head_that_comes_too_slowly_is_not_waited_for(
    pair: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.1)
    late = (408, "the head of a request did not come within 0.1 s")
    assert await refusal(pair, [b"GET /health HTTP/1.1\r\nhost:"]) == late
    async with asyncio.timeout(20), pair.connect() as exchange:
        assert await exchange.reader.read() == b"", "who asks nothing is told nothing"
    async with asyncio.timeout(20), pair.connect() as exchange:
        exchange.writer.write(post())
        assert (await exchange.reply()).status == 200
        exchange.writer.write(b"G")
        assert (await exchange.reply()).status == 408


async def test_a_body_that_comes_too_slowly_is_not_waited_for(
    pair: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow.server.transport.BODY_S", 0.1)
    for path in ("/v1/completions", "/tokenize"):
        async with asyncio.timeout(20), pair.connect() as exchange:
            exchange.ask("POST", path, b'{"prompt":', {"content-length": "100"})
            reply = await exchange.reply()
            assert (reply.status, reply.error["code"]) == (408, "request_timeout")
            assert reply.headers["x-should-retry"] == "false"
    await pair.until(lambda: not pair.service.open)


async def test_requests_behind_one_another_are_answered_in_order(pair: Served) -> None:
    data = b"".join(post(BODY, "1.1", f"x-request-id: r{number}") for number in range(50))
    replies = await answers(pair, data, 50)
    assert [reply.headers["x-request-id"] for reply in replies] == [f"r{number}" for number in range(50)]
    assert {reply.status for reply in replies} == {200}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_with_requests_behind_the_one_that_runs_frees_it(
    tmp_path: Path, stream: bool
) -> None:
    recipe = recipe_of((toy_model(tmp_path, "m", 1, step_s=0.005),), {})
    body = {"prompt": "ab", "max_tokens": 900, "ignore_eos": True, "stream": stream}
    async with serving(recipe) as served:
        async with served.connect() as exchange:
            exchange.writer.write(post(json.dumps(body).encode()) * 3)
            await served.until(lambda: served.service.router.status.models[0].committed_tokens > 5)
            exchange.drop()
        await served.until(lambda: not served.service.open and not served.service.router.load.running, 1)
        assert served.service.router.status.models[0].committed_tokens < 450


async def test_http_1_0_is_answered_and_closed(pair: Served) -> None:
    async with asyncio.timeout(20), pair.connect() as exchange:
        exchange.writer.write(post(BODY, "1.0"))
        reply = await exchange.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert await exchange.reader.read() == b""


@pytest.mark.parametrize(
    "fields",
    [
        ("expect: 100-continue",),
        ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__"),
        ("content-type: application/x-www-form-urlencoded",),
        ("content-type: \xfc\U0001f642",),
        ("connection: close",),
    ],
)
async def test_headers_of_all_kinds_change_nothing(pair: Served, fields: tuple[str, ...]) -> None:
    async with asyncio.timeout(20), pair.connect() as exchange:
        exchange.writer.write(post(BODY, "1.1", *fields))
        if fields[0].startswith("expect"):
            assert await exchange.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await exchange.reply()).status == 200


OFFER = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")


@pytest.mark.parametrize(
    "body",
    [BODY, b"", b"\r\nupgrade: h2c\r\n\r\n"],
)
def test_a_request_is_read_the_same_however_it_is_cut(body: bytes) -> None:
    """One that offers another protocol before, behind and between others, in any two reads."""
    data = post(body, "1.1", *OFFER) + post(body) + post(body, "1.1", *OFFER)
    for cut in range(len(data) + 1):
        assert heard([data[:cut], data[cut:]]) == [body] * 3, cut
    assert heard([data[at : at + 1] for at in range(len(data))]) == [body] * 3


def test_the_end_of_a_head_in_two_reads_is_seen() -> None:
    body = b" " * (2 * LARGEST_HEAD)
    data = post(body)
    end = data.index(b"\r\n\r\n")
    for cut in range(end, end + 5):
        assert heard([data[:cut], data[cut:]]) == [body], cut


def test_an_offer_is_not_worth_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert heard([post(BODY, "1.1", *OFFER)]) == [BODY]
    assert not caplog.records


def test_a_head_is_sent_with_the_first_part_of_its_body() -> None:
    """In one packet, which wakes the client once; what is said before the response is not held back."""

    async def said(request: bytes, parts: Sequence[bytes]) -> list[bytes]:
        connection = Heard()
        transport = mock.Mock(spec=asyncio.Transport)
        transport.get_extra_info.return_value = None
        transport.is_closing.return_value = False
        connection.connection_made(transport)
        connection.data_received(request)
        cycle = connection._running
        assert cycle is not None
        await cycle.receive()
        length = [(b"content-length", b"%d" % len(b"".join(parts)))]
        await cycle.send({"type": "http.response.start", "status": 200, "headers": length})
        for index, part in enumerate(parts, 1):
            more = index < len(parts)
            await cycle.send({"type": "http.response.body", "body": part, "more_body": more})
        connection.connection_lost(None)
        return [call.args[0] for call in transport.write.call_args_list]

    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
    assert asyncio.run(said(post(), [b"abc"])) == [head % 3 + b"abc"]
    assert asyncio.run(said(post(), [b""])) == [head % 0]
    assert asyncio.run(said(post(), [b"a", b"b", b"c"])) == [head % 3 + b"a", b"b", b"c"]
    going_on = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert asyncio.run(said(post(BODY, "1.1", "expect: 100-continue"), [b"a"])) == [going_on, head % 1 + b"a"]
    assert asyncio.run(said(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n", [b"abc"])) == [head % 3]


async def test_a_client_that_closes_its_half_is_taken_to_have_left(pair: Served) -> None:
    async with asyncio.timeout(20), pair.connect() as exchange:
        exchange.writer.write(post(json.dumps({"prompt": "ab", "max_tokens": 800}).encode()))
        exchange.writer.write_eof()
        assert await exchange.reader.read() == b""
    await pair.until(lambda: not pair.service.open, 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON"),
        (b"\xff\xfe{\x00}\x00", "the body is not JSON"),
        (b"[1]", "the body must be a JSON object"),
        (b'{"prompt":' + b"[" * 10**5 + b"]" * 10**5 + b"}", "the body is not JSON"),
        (b'{"prompt":"a\x00"}', "the body is not JSON"),
        (b'{"prompt":"\\ud83d"}', "the body is not JSON"),
        (b'{"prompt":"\xe9"}', "the body is not JSON"),
        (b'{"prompt":"a","seed":1e999}', "seed: expected int, got float"),
        (b'{"prompt":"a","temperature":1e999}', "temperature must be"),
        (b'{"prompt":"a","logit_bias":{"1":-1e999}}', "logit_bias must be"),
        (b'{"prompt":"a","params":{"tau":1e999}}', "parameter 'tau' must be a finite number"),
        (b'{"prompt":"a","temperature":NaN}', "the body is not JSON"),
        (b'{"prompt":"a","max_tokens":2.5}', "max_tokens: expected int, got float"),
        (b'{"prompt":"a","max_tokens":"2"}', "max_tokens: expected int, got str"),
        (b'{"prompt":{"a":1}}', "prompt: expected str | array, got object"),
    ],
)
async def test_a_wrong_body_says_what_is_wrong(pair: Served, body: bytes, message: str) -> None:
    (reply,) = await answers(pair, post(body))
    assert reply.status == 400
    assert reply.error["message"].startswith(message)


async def test_a_body_with_more_values_than_can_be_read_in_time_is_refused(pair: Served) -> None:
    many = b"1," * MOST_VALUES
    for body in (b'{"prompt":[' + many + b"1,1]}", b'{"prompt":[' + b"[]," * MOST_VALUES + b"[],1]}"):
        (reply,) = await answers(pair, post(body))
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
        assert "values" in reply.error["message"]
    (reply,) = await answers(pair, post(b'{"prompt":[' + many[:-20] + b"1]}"))
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


async def test_half_open_connections_do_not_stop_the_others(pair: Served) -> None:
    """A thousand that have sent half a request."""
    sockets = [socket.create_connection(("127.0.0.1", pair.port)) for _ in range(1000)]
    try:
        for sock in sockets:
            sock.sendall(post()[:-3])
        assert (await pair.complete("ab", max_tokens=2))["choices"]
    finally:
        for sock in sockets:
            sock.close()
    await pair.until(lambda: not pair.service.open)
