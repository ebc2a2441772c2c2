"""What every request meets: keys, ids, logs, addresses that do not exist."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.recipes import toy_pair
from tests.server.conftest import Served, serving

pytestmark = pytest.mark.anyio

KEYS = ("sk-one", "sk-zwei-ü")


@pytest.fixture(scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory, pair: Served) -> AsyncIterator[Served]:
    """Begun after the server of all tests, since servers of fixtures must end in the opposite order."""
    recipe = toy_pair(tmp_path_factory.mktemp("guarded"))
    async with serving(recipe, names=("one", "zwei"), api_keys=KEYS, access_log=True) as served:
        yield served


async def test_names_of_the_recipe_and_of_its_models_are_listed_and_answer(guarded: Served) -> None:
    key = {"authorization": "Bearer sk-one"}
    cards = (await guarded.get("/v1/models", **key)).json
    assert cards["object"] == "list"
    names = ["one", "zwei", "one/slm", "one/llm", "zwei/slm", "zwei/llm"]
    assert [card["id"] for card in cards["data"]] == names
    for card in cards["data"]:
        assert set(card) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
        assert (card["object"], card["owned_by"], card["max_model_len"]) == ("model", "tokenflow", 1024)
        assert (await guarded.get(f"/v1/models/{card['id']}", **key)).json == card
        body = {"model": card["id"], "prompt": "a", "max_tokens": 1}
        assert (await guarded.post("/v1/completions", body, **key)).json["model"] == card["id"]
    large = next(card for card in cards["data"] if card["id"] == "one/llm")
    assert large["root"].endswith("/llm")
    assert (await guarded.get("/v1/models/", **key)).json == cards
    for name in ("three", "one/", "one/slm/x", "toy", "/"):
        reply = await guarded.get(f"/v1/models/{name}", **key)
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        posted = await guarded.post("/v1/completions", {"model": name, "prompt": "a"}, **key)
        assert (posted.status, posted.error["param"]) == (404, "model")
        assert "models: one, zwei, one/slm" in posted.error["message"]


@pytest.mark.parametrize("given", ["Bearer sk-one", "bearer  sk-one", "sk-one", "Bearer sk-zwei-ü"])
async def test_any_key_opens_what_makes_tokens(guarded: Served, given: str) -> None:
    header = given.encode().decode("latin-1")
    for path in ("/v1/completions", "/generate"):
        body = {"prompt": "a", "max_tokens": 1} if path != "/generate" else {"text": "a"}
        assert (await guarded.post(path, body, authorization=header)).status == 200


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", "Bearer sk-on", "Basic sk-one", "sk-one sk-one"]
)
async def test_no_key_and_wrong_keys_open_nothing(guarded: Served, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/v1/nothing"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/generate"),
    ):
        reply = await guarded.ask(method, path, {}, headers)
        assert (reply.status, reply.error["type"]) == (401, "authentication_error")
        assert reply.error["code"] == "invalid_api_key"
        assert "sk-" not in reply.error["message"]


async def test_health_metrics_and_the_tokenizer_need_no_key(guarded: Served) -> None:
    for path in ("/health", "/ping", "/ready", "/metrics", "/version", "/tokenizer_info", "/openapi.json"):
        assert (await guarded.get(path)).status == 200, path
    assert (await guarded.post("/tokenize", {"prompt": "a"})).status == 200


async def test_a_request_keeps_the_id_that_its_client_gives(pair: Served) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    reply = await pair.post("/v1/completions", body, **{"X-Request-Id": "bench-1a2b-7"})
    assert reply.headers["x-request-id"] == "bench-1a2b-7"
    assert reply.json["id"] == "cmpl-bench-1a2b-7"
    again = await pair.post("/v1/completions", body, **{"X-Request-Id": "bench-1a2b-7"})
    assert again.status == 200
    named = await pair.post("/v1/completions", {**body, "request_id": "mine"})
    assert (named.json["id"], named.headers["x-request-id"]) == ("cmpl-mine", "mine")
    failed = await pair.post("/v1/completions", {}, **{"X-Request-Id": "f"})
    assert (failed.status, failed.headers["x-request-id"]) == (400, "f")


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ü"])
async def test_an_id_that_is_none_is_replaced(pair: Served, given: str) -> None:
    reply = await pair.get("/health", **{"X-Request-Id": given})
    assert len(reply.headers["x-request-id"]) == 32
    assert reply.headers["x-request-id"] != (await pair.get("/health")).headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("POST", "/v1/completions/", 404),
        ("GET", "/%00%ff", 404),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_an_address_that_does_not_exist_is_an_error_like_others(
    pair: Served, method: str, path: str, status: int
) -> None:
    reply = await pair.ask(method, path)
    assert (reply.status, reply.error["type"]) == (status, "invalid_request_error")
    assert reply.error["code"] == "not_found"
    assert f"{method} {path.replace('%00%ff', '')}" in reply.error["message"]
    assert ("allow" in reply.headers) == (status == 405)


async def test_every_request_is_one_line_of_json_in_the_log(
    guarded: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tokenflow.access")
    headers = {"authorization": "Bearer sk-one", "x-request-id": "seven"}
    await guarded.post("/v1/completions", {"prompt": "ab", "max_tokens": 5, "ignore_eos": True}, **headers)
    await guarded.get("/nope")
    lines = [json.loads(record.message) for record in caplog.records if record.name == "tokenflow.access"]
    answered, missing = lines
    assert answered["seconds"] > 0
    assert {key: answered[key] for key in ("request_id", "method", "path", "status", "client")} == {
        "request_id": "seven",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "client": "127.0.0.1",
    }
    assert (answered["prompt_tokens"], answered["completion_tokens"]) == (3, 5)
    assert answered["finish_reasons"] == ["length"]
    assert (missing["status"], "prompt_tokens" in missing) == (404, False)


async def test_a_fault_of_our_own_is_told_without_its_insides(
    pair: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("tokenflow.server.completions.usage", broken)
    reply = await pair.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert reply.headers["x-should-retry"] == "false"
    assert "secret" not in reply.error["message"]
    assert "ZeroDivisionError: secret" in caplog.text


async def test_a_folder_of_this_machine_is_not_told(tmp_path: Path) -> None:
    from tokenflow.errors import RouteFailed
    from tokenflow.server.errors import api_error

    error = api_error(RouteFailed(f"{tmp_path}/recipe.py:3: broken, see https://example.org/a/b and a/b"))
    assert str(tmp_path) not in error.message
    assert error.message == "recipe.py:3: broken, see https://example.org/a/b and a/b"
    assert len(api_error(RouteFailed("x" * 10**6)).envelope()) < 2000
