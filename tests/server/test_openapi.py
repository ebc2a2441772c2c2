"""Whatever is sent: an answer in time, no fault of ours, and no long answer to a bad request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.client import Client, Reply
from tests.server.conftest import Served
from tokenflow.server.openapi import document

LARGEST_REFUSAL = 64 * 2**10
PATHS = [path for path, item in document()["paths"].items() if "post" in item]

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.text(min_size=4000, max_size=5000),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def of_schema(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema of the document allows, more or less."""
    if "$ref" in schema:
        return of_schema(document()["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]])
    if "anyOf" in schema:
        return st.one_of([of_schema(option) for option in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(-3, 40) | st.integers()
        case "number":
            return st.floats(-2, 3) | st.floats(allow_nan=False, allow_infinity=False)
        case "string":
            return st.text(max_size=30)
        case "array":
            return st.lists(of_schema(schema.get("items", {})), max_size=5)
        case "object" if "properties" in schema:
            properties = {name: of_schema(item) for name, item in schema["properties"].items()}
            needed = {name: properties.pop(name) for name in schema.get("required", ())}
            return st.fixed_dictionaries(needed, optional=properties)
        case "object":
            return st.dictionaries(
                st.text(max_size=8), of_schema(schema.get("additionalProperties", {})), max_size=3
            )
    return junk


def bodies(path: str) -> st.SearchStrategy[Any]:
    """Requests that are right in most places."""
    schema = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    names = st.sampled_from(
        sorted(document()["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["properties"])
    )
    limit = {"max_tokens": 4, "max_completion_tokens": 4}

    def spoil(body: dict[str, Any], wrong: dict[str, Any]) -> dict[str, Any]:
        if path == "/generate":  # one of two keys, which the schema cannot say
            body = {**body, "text": body.get("text") or "a"}
            body.pop("input_ids", None)
        body = {**body, **wrong}
        # What is right is answered, and shall not take long.
        return {**body, **{name: most for name, most in limit.items() if isinstance(body.get(name, 0), int)}}

    return st.builds(spoil, of_schema(schema), st.dictionaries(names, junk, max_size=2)) | junk


def send(pair: Served, path: str, data: bytes) -> Reply:
    """Ask from another thread's loop, while the server runs in its own."""
    return asyncio.run(Client(pair.port).post(path, data))


@pytest.mark.anyio
@pytest.mark.parametrize("path", PATHS)
async def test_no_body_is_a_fault_or_a_hang_or_gets_a_long_refusal(pair: Served, path: str) -> None:
    from anyio import to_thread

    statuses: set[int] = set()

    @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(body=bodies(path))
    def check(body: Any) -> None:
        reply = send(pair, path, json.dumps(body).encode())
        statuses.add(reply.status)
        assert reply.status in (200, 400, 404), reply.body
        if reply.status != 200:
            assert len(reply.body) < LARGEST_REFUSAL
            assert reply.error["message"]

    await to_thread.run_sync(check)
    assert statuses >= {200, 400}, "too few requests were right, or wrong: the test does not test"
    assert (await pair.get("/health")).status == 200


@pytest.mark.anyio
async def test_bytes_that_are_no_request_are_refused_or_dropped(pair: Served) -> None:
    from anyio import to_thread

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(data=st.binary(max_size=300), path=st.sampled_from(PATHS))
    def check(data: bytes, path: str) -> None:
        reply = send(pair, path, data)
        assert reply.status == 400
        assert len(reply.body) < LARGEST_REFUSAL

    await to_thread.run_sync(check)


@pytest.mark.anyio
async def test_the_largest_wrong_body_gets_a_short_answer(pair: Served) -> None:
    wrong = "x" * 2**20
    for body in (
        {"prompt": "a", "temperature": wrong},
        {"prompt": "a", "stop": [wrong, 3]},
        {"prompt": "a", "model": wrong},
        {"prompt": "a", "stop": wrong, "n": wrong},
        {"prompt": "a", "logit_bias": {wrong: 1}},
        {"prompt": "a", "params": {wrong: 1}},
        {"prompt": [wrong, 1]},
        {wrong: wrong},
    ):
        reply = await pair.post("/v1/completions", body)
        assert reply.status in (400, 404)
        assert len(reply.body) < 4000


@pytest.mark.anyio
async def test_the_document_describes_every_endpoint(pair: Served) -> None:
    from tokenflow.server.app import ROUTES

    described = (await pair.get("/openapi.json")).json
    assert described["openapi"] == "3.1.0"
    aliases = {"/ping", "/metrics/", "/v1/models/", "/get_model_info", "/get_server_info", "/openapi.json"}
    assert {route.path.replace(":path", "") for route in ROUTES} - aliases == set(described["paths"])
    schemas = described["components"]["schemas"]
    prompt = schemas["Completions"]["properties"]["prompt"]
    text, listed = prompt["anyOf"]
    assert text == {"type": "string"}
    assert [kind["type"] for kind in listed["items"]["anyOf"]] == ["string", "integer", "array"]
    assert schemas["Chat"]["properties"]["messages"]["items"]["required"] == ["role", "content"]
