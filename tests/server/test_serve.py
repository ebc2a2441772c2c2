"""``tokenflow serve`` as its users start and stop it: real processes, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.client import Client, Exchange
from tests.server.process import LONG, ROOT, SHORT, body_of, client_of, running, workers_of

pytestmark = pytest.mark.anyio


async def test_a_server_whose_log_nobody_reads_any_more_drains_as_any_other() -> None:
    async with running("--access-log") as server:
        client = await client_of(server)
        await server.until("try: curl")
        async with client.open("POST", "/v1/completions", SHORT) as stream:
            assert await stream.head() == 200
            server.process._transport.get_pipe_transport(2).close()  # type: ignore[attr-defined]
            server.process.send_signal(signal.SIGTERM)
            body = await body_of(stream)
        assert body.count(b'"finish_reason":"length"') == 1
        assert body.endswith(b"data: [DONE]\n\n")
        # What could not be written is still to be flushed when Python exits, which makes its 0 a 120.
        assert await server.process.wait() in (0, 120)


async def test_a_server_keeps_its_settings_and_lets_open_streams_end(tmp_path: Path) -> None:
    args = ["--served-model-name", "demo", "--max-model-len", "960", "--access-log", "--api-key", "k1"]
    async with running(*args, env={"TOKENFLOW_API_KEY": "k2", "TOKENFLOW_DRAIN_TIMEOUT": "40"}) as server:
        said = await server.until("settings:")
        for setting in (
            "served_model_name ('demo',)",
            "max_model_len 960",
            "api_key ***",
            "drain_timeout 40.0",
        ):
            assert setting in said
        client = await client_of(server)
        example = await server.until("try: curl")
        assert f"http://127.0.0.1:{client.port}/v1/completions" in example
        assert '"model": "demo"' in example
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 2

        key = {"authorization": "Bearer k1"}
        assert (await client.get("/v1/models", authorization="Bearer k2")).status == 401
        card = (await client.get("/v1/models", **key)).json["data"][0]
        assert (card["id"], card["max_model_len"]) == ("demo", 960)

        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(client.open("POST", "/v1/completions", SHORT, key))
                for _ in range(4)
            ]
            idle = await stack.enter_async_context(client.connect())
            for stream in streams:
                assert await stream.head() == 200
            server.process.send_signal(signal.SIGTERM)
            assert "4 open requests, 40 s at most" in await server.until("draining")
            idle.ask("GET", "/health")
            assert (await idle.reply()).error["code"] == "not_ready"
            bodies = await asyncio.gather(*(body_of(stream) for stream in streams))
        for body in bodies:
            assert body.count(b'"finish_reason":"length"') == 1
            assert body.endswith(b"data: [DONE]\n\n")
            assert b'"error"' not in body
        code, said = await server.end()
        assert code == 0, said
        lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert [line["completion_tokens"] for line in lines if "completion_tokens" in line] == [200] * 4
        assert "Traceback" not in said
        assert not any(child.is_running() for child in children)


async def test_what_does_not_end_in_time_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    async with running("--uds", str(path), "--drain-timeout", "0") as server:
        assert f"--unix-socket {path} http://localhost" in await server.until("ready in")
        reader, writer = await asyncio.open_unix_connection(path)
        stream = Exchange(reader, writer)
        stream.ask("POST", "/v1/completions", {**LONG, "n": 4})
        assert await stream.head() == 200
        server.process.send_signal(signal.SIGINT)
        *_, error, done = (await body_of(stream)).decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        told = json.loads(error.removeprefix("data: "))["error"]
        assert (told["type"], told["code"]) == ("unavailable_error", "not_ready")
        code, said = await server.end()
        assert code == 0, said
        assert "Traceback" not in said
        assert not path.exists()
        writer.close()


async def test_the_second_signal_cuts_the_drain_short() -> None:
    async with running() as server:
        client = await client_of(server)
        async with client.open("POST", "/v1/completions", {**LONG, "n": 32}) as stream:
            assert await stream.head() == 200
            server.process.send_signal(signal.SIGTERM)
            await server.until("draining")
            server.process.send_signal(signal.SIGTERM)
            assert b"not_ready" in await body_of(stream)
        code, said = await server.end()
        assert code == 130, said


async def test_what_was_not_sent_by_the_end_of_the_drain_is_told_so() -> None:
    async with running("--drain-timeout", "0.2") as server:
        client = await client_of(server)
        async with client.open("POST", "/v1/completions", b'{"prompt": ', {"content-length": "99"}) as half:
            assert (await client.get("/health")).status == 200
            server.process.send_signal(signal.SIGTERM)
            assert "1 open requests" in await server.until("draining")
            reply = await half.reply()
            assert (reply.status, reply.error["code"]) == (503, "not_ready")
            assert await half.reader.read() == b""
        code, said = await server.end()
        assert code == 0, said
        assert "Traceback" not in said


async def test_the_end_of_its_terminal_drains_a_server_however_often_it_is_told() -> None:
    async with running() as server:
        client = await client_of(server)
        async with client.open("POST", "/v1/completions", SHORT) as stream:
            assert await stream.head() == 200
            server.process.send_signal(signal.SIGHUP)
            await server.until("draining")
            server.process.send_signal(signal.SIGHUP)
            body = await body_of(stream)
        assert body.count(b'"finish_reason":"length"') == 1
        code, said = await server.end()
        assert code == 0, said


async def test_with_nohup_a_server_outlives_its_terminal() -> None:
    async with running(by=["nohup"]) as server:
        client = await client_of(server)
        server.process.send_signal(signal.SIGHUP)
        assert (await client.complete(**{**SHORT, "stream": False}))["choices"]
        server.process.send_signal(signal.SIGTERM)
        code, said = await server.end()
        assert code == 0, said


@pytest.mark.parametrize("strike", [psutil.Process.kill, psutil.Process.suspend], ids=["killed", "hung"])
async def test_workers_that_are_lost_under_load_are_replaced_and_no_client_notices(
    strike: Callable[[psutil.Process], None],
) -> None:
    timeouts = [f"--set=models.{model}.step_timeout=1" for model in ("slm", "llm")]
    async with running(*timeouts) as server:
        client = await client_of(server)
        (whole,) = (await client.complete(**{**SHORT, "stream": False}))["choices"]
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(client.open("POST", "/v1/completions", SHORT))
                for _ in range(4)
            ]
            for stream in streams:
                assert await stream.head() == 200
            for worker in workers_of(server):
                strike(worker)
            assert (await client.get("/health")).status == 200
            bodies = await asyncio.gather(*(body_of(stream) for stream in streams))
        assert [text_of(body) for body in bodies] == [whole["text"]] * 4
        assert await client.metric("worker_restarts_total") == 2
        assert (await client.get("/health")).status == 200
        server.process.send_signal(signal.SIGTERM)
        code, said = await server.end()
        assert code == 0, said


async def test_a_model_that_is_given_up_is_named_to_all_who_want_it() -> None:
    async with running(*(f"--set=models.{model}.restarts=0" for model in ("slm", "llm"))) as server:
        client = await client_of(server)
        async with client.open("POST", "/v1/completions", {**LONG, "n": 4}) as stream:
            assert await stream.head() == 200
            for worker in workers_of(server):
                worker.kill()
            *_, error, done = (await body_of(stream)).decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        told = json.loads(error.removeprefix("data: "))["error"]
        assert (told["type"], told["code"]) == ("unavailable_error", "worker_died")
        for reply in (await client.get("/health"), await client.post("/v1/completions", {"prompt": "a"})):
            assert (reply.status, reply.error["code"]) == (503, "model_down")
            for message in (reply.error["message"], told["message"]):
                assert re.search(r"model '[sl]lm' is given up: .* ended with signal 9 \(SIGKILL\)", message)
        server.process.send_signal(signal.SIGTERM)
        code, said = await server.end()
        assert code == 0, said
        assert "Traceback" not in said


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGTERM] * 2, [signal.SIGINT] * 2])
async def test_a_server_that_loads_listens_already_and_can_be_stopped(signals: list[signal.Signals]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with running("--port", str(port)) as server:
        await server.until("loading")
        reply = await Client(port).get("/health")
        assert (reply.status, reply.error["message"]) == (503, "the models are loading")
        metrics = await Client(port).get("/metrics")
        assert metrics.status == 200
        assert b"num_requests_running" not in metrics.body
        children = psutil.Process(server.process.pid).children(recursive=True)
        for number in signals:
            server.process.send_signal(number)
        code, said = await server.end()
        assert code == 130, said
        assert "Traceback" not in said
        _, alive = psutil.wait_procs(children, timeout=3)
        assert not alive


async def test_signals_on_its_way_out_do_not_change_how_a_server_ends() -> None:
    async with running() as server:
        await server.until("loading")
        while server.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.002)
        code, said = await server.end()
        assert code == 130, said
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("args", "env", "code", "message"),
    [
        (["--port", "abc"], {}, 2, "--port must be a whole number of 0 to 65535, got 'abc'"),
        ([], {"TOKENFLOW_MAX_QUEUED_REQS": "-1"}, 2, "TOKENFLOW_MAX_QUEUED_REQS must be a whole number of 0"),
        ([], {"TOKENFLOW_ACCESS_LOG": "maybe"}, 2, "TOKENFLOW_ACCESS_LOG must be true or false, got 'maybe'"),
        (["--drain-timeout", "inf"], {}, 2, "--drain-timeout must be a number of seconds of at least 0"),
        (["--log-level", "loud"], {}, 2, "--log-level must be one of"),
        (["--set", "entry=lm"], {}, 2, 'entry: unknown model "lm"'),
        (["--host", "203.0.113.1"], {}, 1, "cannot listen at 203.0.113.1:0: Cannot assign requested address"),
        (["--max-model-len", "99999"], {}, 1, "context"),
    ],
)
async def test_a_wrong_setting_is_named_in_the_last_line(
    args: list[str], env: dict[str, str], code: int, message: str
) -> None:
    async with running(*args, env=env) as server:
        ended, said = await server.end()
    assert ended == code, said
    assert message in said.strip().splitlines()[-1 if code != 2 or "entry" not in message else -2]
    assert "Traceback" not in said


def text_of(body: bytes) -> str:
    """The text of a streamed completion."""
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def test_help_names_every_option_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from tokenflow.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    for flag in (
        "--host --port --uds --served-model-name --api-key --max-queued-reqs --max-model-len --drain-timeout "
        "--log-level --access-log --set"
    ).split():
        assert flag in done.stdout
    loaded: Any = {name.split(".")[0] for name in done.stderr.split()}
    assert not loaded & {"torch", "pydantic", "uvicorn", "starlette", "numpy"}
