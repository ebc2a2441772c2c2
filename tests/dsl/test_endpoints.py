"""What a recipe may ask of a model behind an endpoint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes_python import decorated
from tokenflow.dsl.load import load_recipe
from tokenflow.errors import RecipeError
from tokenflow.types import EndpointConfig

REMOTE: dict[str, Any] = {
    "path": "owner/large",
    "engine": "openai",
    "endpoint": {"base_url": "http://127.0.0.1:8000/v1"},
}


def recipe(when: str = "margin < 0.5", **llm: Any) -> dict[str, Any]:
    """Two models, of which the second is behind an endpoint and has a rule."""
    return {
        "name": "pair",
        "entry": "slm",
        "models": {"slm": "owner/small", "llm": {**REMOTE, **llm}},
        "routes": {
            "slm": [{"when": "entropy > 0.1", "to": "llm", "send": "drop_last"}],
            "llm": [{"when": when, "to": "slm", "send": "keep"}],
        },
    }


def problems(source: dict[str, Any]) -> list[str]:
    """What is wrong with a recipe, without where it stands."""
    with pytest.raises(RecipeError) as refused:
        load_recipe(source)
    return [f"{problem.path}: {problem.message}" for problem in refused.value.problems]


def test_an_endpoint_is_part_of_the_model() -> None:
    remote = {**REMOTE["endpoint"], "model_id": "large", "api_key_env": "KEY", "span": 4, "timeout_s": 5}
    loaded = load_recipe(recipe(endpoint=remote)).model("llm").config.endpoint
    assert loaded == EndpointConfig(
        base_url="http://127.0.0.1:8000/v1", model_id="large", api_key_env="KEY", span=4, timeout_s=5.0
    )


@pytest.mark.parametrize(
    "when",
    ["margin < 0.5", "confidence > 0.9 or logprob < -2", "position % 8 == 7", 'at("\\n")', "draw < 0.5"],
)
def test_what_the_best_tokens_tell_can_be_asked(when: str) -> None:
    assert load_recipe(recipe(when)).model("llm").config.engine == "openai"


@pytest.mark.parametrize("when", ["entropy < 0.1", "1 - window(entropy_nats, 3) > 0"])
def test_what_needs_every_token_is_refused(when: str) -> None:
    name = "entropy_nats" if "nats" in when else "entropy"
    assert problems(recipe(when)) == [
        f'routes.llm[0].when: "{name}" needs the probability of every token, and an endpoint lists the best '
        "ones: use confidence, margin or logprob"
    ]


@pytest.mark.parametrize(("signal", "listed", "needed"), [("margin", 1, 2), ("confidence", 0, 1)])
def test_what_needs_more_tokens_than_are_listed_is_refused(signal: str, listed: int, needed: int) -> None:
    endpoint = {**REMOTE["endpoint"], "top_logprobs": listed}
    assert problems(recipe(f"{signal} < 0.5", endpoint=endpoint)) == [
        f'routes.llm[0].when: "{signal}" needs endpoint.top_logprobs of {needed} or more, it is {listed}'
    ]


def test_an_engine_and_an_endpoint_belong_together() -> None:
    assert problems(recipe(engine="torch")) == ['models.llm.endpoint: an endpoint needs "engine: openai"']
    assert problems(recipe(endpoint=None)) == [
        'models.llm.engine: engine "openai" needs "endpoint: {base_url: http://...}"'
    ]


def test_an_endpoint_has_a_url_and_the_name_of_a_variable() -> None:
    endpoint = {"base_url": "127.0.0.1:8000", "api_key_env": "sk-12", "timeout_s": 0}
    assert problems(recipe(endpoint=endpoint)) == [
        "models.llm.endpoint.base_url: expected a URL that begins with http:// or https://, got "
        '"127.0.0.1:8000"',
        'models.llm.endpoint.api_key_env: expected the name of an environment variable, got "sk-12"',
        "models.llm.endpoint.timeout_s: must be greater than 0, got 0",
    ]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (
            "http://127.0.0.1:99999/v1",
            "must be like http://127.0.0.1:8000/v1, got 'http://127.0.0.1:99999/v1'",
        ),
        ("http://a b/v1", "must be like http://127.0.0.1:8000/v1, got 'http://a b/v1'"),
        ("http://a\x01b/v1", "must be like http://127.0.0.1:8000/v1, got 'http://a\\x01b/v1'"),
        ("http://a..b/v1", "must be like http://127.0.0.1:8000/v1, got 'http://a..b/v1'"),
        (f"http://{'a' * 64}.b/v1", "must be like http://127.0.0.1:8000/v1, got 'http://aaaa"),
        ("http://x/v 1", "must be like http://127.0.0.1:8000/v1, got 'http://x/v 1'"),
        (
            "https://me:s3cret@x/v1",
            "holds a name or a password; a key comes from the environment, by api_key_env",
        ),
        (
            "https://me:s3cret@x:99999/v1",
            "holds a name or a password; a key comes from the environment, by api_key_env",
        ),
        ("http://x/v1?version=2", "must end with its path, as in http://127.0.0.1:8000/v1, got "),
    ],
)
def test_a_url_has_nothing_that_would_be_left_out(url: str, why: str) -> None:
    found = problems(recipe(endpoint={"base_url": url}))
    assert len(found) == 1
    assert found[0].startswith(f"models.llm.endpoint.base_url: it {why}")
    assert "s3cret" not in found[0]


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1]:8000/v1/",
        "http://[::1]/v1",
        "https://x",
        "http://x:8000/some/path/v1",
        "http://b\u00fccher.example",
    ],
)
def test_a_url_may_have_any_host_and_path(url: str) -> None:
    endpoint = load_recipe(recipe(endpoint={"base_url": url})).model("llm").config.endpoint
    assert endpoint is not None
    assert endpoint.base_url == url


def test_a_model_behind_an_endpoint_checks_no_tokens() -> None:
    source = recipe(verify=True) | {"rollback": 4}
    assert problems(source) == [
        "models.llm.verify: an endpoint gives the log-probabilities of the next token only: it cannot check "
        "tokens"
    ]


def test_a_model_behind_an_endpoint_scores_no_prompts() -> None:
    assert problems(recipe() | {"scorer": "llm"}) == [
        "scorer: an endpoint does not score prompts: name a model that runs here, or leave it out"
    ]
    assert load_recipe(recipe() | {"scorer": "slm"}).scorer == "slm"


def test_a_penalty_that_needs_logits_is_no_default_beside_an_endpoint() -> None:
    assert problems(recipe() | {"sampling": {"repetition_penalty": 1.1}}) == [
        "sampling.repetition_penalty: llm runs behind an endpoint, which gives no logits to penalise: leave "
        "it out"
    ]
    assert load_recipe(recipe() | {"sampling": {"repetition_penalty": 1.0, "presence_penalty": 0.5}})


def test_a_head_cannot_read_what_an_endpoint_does_not_show() -> None:
    source = recipe('head("r") > 0.5') | {"heads": {"r": {"kind": "r2r", "path": "owner/head"}}}
    assert problems(source) == [
        "heads.r: it reads states of llm, which runs behind an endpoint and does not show them"
    ]


def test_a_route_in_python_sees_logits_and_is_refused() -> None:
    overrides = ["models.llm.engine=openai", "models.llm.endpoint={base_url: http://127.0.0.1:1/v1}"]
    with pytest.raises(RecipeError, match="a route in Python sees logits, which an endpoint does not give"):
        load_recipe(decorated.r_stitch, overrides)


def test_a_call_must_fit_a_step_twice() -> None:
    slow = {**REMOTE["endpoint"], "timeout_s": 54}
    assert problems(recipe(endpoint=slow)) == [
        "models.llm.endpoint.timeout_s: a call of 54 s leaves a step of 120 s (step_timeout) no time to try "
        "again"
    ]
    assert problems(recipe(step_timeout=100)) == [
        "models.llm.step_timeout: a call of 50 s leaves a step of 100 s (step_timeout) no time to try again"
    ]
    assert load_recipe(recipe(endpoint=slow, step_timeout=121))
    assert load_recipe(recipe())
