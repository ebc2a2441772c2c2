"""Tentative tokens: checked by a model or taken back by a recipe, and never shown before they are final."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.algorithms.held import watched
from tests.algorithms.toys import toy_recipe
from tests.exactness import answers
from tests.recipes_python import handoffs
from tests.reference.cases import DEMO, r_stitch
from tests.reference.record import Recorded
from tests.test_router import Log
from tests.toy.engine import toy_logits
from tokenflow.errors import RouteFailed
from tokenflow.router import Router
from tokenflow.types import Completion, StreamEvent

pytestmark = pytest.mark.anyio

SPECULATIVE = DEMO / "speculative.yaml"
LARGE_ONLY = {"tau": -1.0}
"""With R-Stitch the large model, with the code that it has in the other recipe, writes everything."""
PROMPT = [1, 40, 50, 60]


@pytest.fixture
async def checked(worker_threads: None) -> AsyncIterator[Router]:
    async with Router(SPECULATIVE) as router:
        yield router


@pytest.fixture
async def large(worker_threads: None) -> AsyncIterator[Router]:
    async with Router(DEMO.parent / "demo.yaml") as router:
        yield router


async def streamed(router: Router, prompt: list[int], **request: Any) -> list[StreamEvent]:
    return [event async for event in router.stream(prompt, **request)]


def text_and_end(completion: Completion) -> tuple[str, list[int], str]:
    return completion.text, completion.token_ids, completion.finish_reason


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 6},
        {"max_tokens": 7},
        {"max_tokens": 8},
        {"stop": ("21",)},
        {"stop": ("30, 3",)},
        {"stop": ("Answer",)},
        {"stop_token_ids": (34,)},
        {"ignore_eos": True, "max_tokens": 60},
        {"min_tokens": 50, "max_tokens": 60},
        {"temperature": 0.7, "seed": 3, "max_tokens": 60},
        {"temperature": 1.0, "seed": 4, "top_p": 0.9, "max_tokens": 60},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "max_tokens": 60},
        {"logit_bias": {17: -3.0, 21: 2.0}, "max_tokens": 60},
    ],
)
async def test_the_text_is_the_large_models_own_under_all_settings(
    request_: dict[str, Any], checked: Router, large: Router, alone: Recorded
) -> None:
    """Ends, stop strings, penalties and random numbers are as if nothing had been drafted."""
    request = {"max_tokens": 300, **request_}
    for index in (0, 3, 6):
        prompt = alone.prompts[index]
        expected = await large.generate(prompt, params=LARGE_ONLY, **request)
        assert text_and_end(await checked.generate(prompt, **request)) == text_and_end(expected)


async def test_streams_show_final_tokens_only(checked: Router, alone: Recorded) -> None:
    for index in (0, 1, 5):
        events = await streamed(checked, alone.prompts[index], max_tokens=300)
        whole = events[-1].completion
        assert whole is not None
        assert "".join(event.text for event in events) == whole.text
        shown = tuple(token for event in events for token in event.tokens)
        assert shown == whole.tokens
        assert len(events) > 5
        # What is shown at once ends in a token of the model that checks, or at the end.
        assert {event.tokens[-1].model for event in events[:-1]} == {"llm"}
        assert whole.usage.by_model == {name: whole.models.count(name) for name in ("slm", "llm")}
        assert whole.usage.completion_tokens == len(whole.tokens)


async def test_a_stream_with_a_stop_string_never_shows_it(checked: Router, alone: Recorded) -> None:
    events = await streamed(checked, alone.prompts[0], max_tokens=300, stop=("3*7=2",))
    assert "".join(event.text for event in events) == "90*7=630, "


async def test_drafts_of_any_length_give_the_same_text(alone: Recorded) -> None:
    prompts = {index: alone.prompts[index] for index in (0, 1, 5, 6)}
    texts = []
    for draft in (1, 2, 7, 16):
        overrides = [f"rollback={draft}", f"routes.slm[0].after={draft}"]
        async with Router(SPECULATIVE, overrides=overrides) as router:
            completions = await answers(router, prompts, 4, max_tokens=300)
        texts.append({index: completion.token_ids for index, completion in completions.items()})
    assert all(text == texts[0] for text in texts)


async def test_a_step_is_drafted_and_checked_as_a_whole(alone: Recorded) -> None:
    """Steps end with a space here; what is shown at once is a step, or what of it is right."""
    recipe = {
        "name": "steps",
        "entry": "slm",
        "rollback": 60,
        "rollback_to": " ",
        "models": {
            "slm": {"path": str(DEMO / "small"), "dtype": "float32"},
            "llm": {"path": str(DEMO / "large"), "dtype": "float32", "verify": True},
        },
        "routes": {
            "slm": [{"at": " ", "to": "llm", "send": "keep"}, {"after": 50, "to": "llm", "send": "keep"}],
            "llm": [{"after": 1, "to": "slm", "send": "keep"}],
        },
    }
    async with Router(recipe) as router:
        for index in (0, 1, 5, 6):
            events = await streamed(router, alone.prompts[index], max_tokens=300)
            whole = events[-1].completion
            assert whole is not None
            assert tuple(whole.token_ids) == alone.traces[r_stitch(-1.0), index].tokens[:300]
            assert max(len(event.tokens) for event in events) > 5


def speculative(folder: Path, **options: Any) -> Any:
    recipe = {
        "rollback": 5,
        "models": {"slm": {}, "llm": {"verify": True}},
        "routes": {
            "slm": [
                {"when": "entropy > 0.45", "to": "llm", "send": "drop_last"},
                {"after": 5, "to": "llm", "send": "keep"},
            ],
            "llm": [{"when": "entropy < 0.45", "to": "slm", "send": "keep"}],
        },
    }
    return toy_recipe(folder, recipe, slm={"salt": 1, **options}, llm={"salt": 2, **options})


def greedy(prompt: Sequence[int], salt: int, count: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(toy_logits(tokens, 128, salt)[:100].argmax()))
    return tokens[len(prompt) :]


async def test_drafts_survive_preemption_chunks_and_company(tmp_path: Path) -> None:
    """Drafts that are nearly always wrong, in caches that hold three requests."""
    log, prompts = Log(), {seed: [1, 40, 50, 20 + seed] for seed in range(16)}
    recipe = speculative(tmp_path, kv_capacity=140)
    async with Router(recipe, observer=log) as router:
        completions = await answers(router, prompts, 16, max_tokens=30, ignore_eos=True)
        await log.until(lambda: not log.open_handles)
    for seed, completion in completions.items():
        assert completion.token_ids == greedy(prompts[seed], 2, 30)
        assert completion.usage.dropped > 0
    assert any(opened.epoch for _, step, _ in log.steps for opened in step.open), "nothing was preempted"


@st.composite
def drafting(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A recipe in which one or two models draft, as much as may be tentative or more, and its options."""
    names, small = ("slm", "mid", "llm"), draw(st.booleans())
    drafts = [draw(st.integers(1, 4))] if small else [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    names = ("slm", "llm") if small else names
    sometimes = st.sampled_from(["entropy > 0.45", "token % 3 == 0", "draw < 0.3"])
    sends = st.sampled_from(["keep", "drop_last"])
    recipe = {
        "rollback": draw(st.integers(1, sum(drafts) + 2)),
        "models": {name: {"max_batch_tokens": draw(st.integers(1, 9))} for name in names},
        "routes": {
            **{
                name: [
                    {"when": draw(sometimes), "to": "llm", "send": draw(sends)},
                    {"after": length, "to": names[code], "send": "keep"},
                ]
                for code, (name, length) in enumerate(zip(names, drafts, strict=False), 1)
            },
            "llm": [{"when": draw(sometimes), "to": "slm", "send": draw(sends)}],
        },
        "batching": {"policy": "fixed", "thresholds": {name: draw(st.integers(1, 3)) for name in names}},
    }
    recipe["models"]["llm"]["verify"] = True
    narrow = {"kv_capacity": 110, "block_size": draw(st.integers(1, 8))} if draw(st.booleans()) else {}
    # Drafts of a model with the same salt are right.
    salts = {"slm": draw(st.sampled_from([1, 9])), "mid": draw(st.sampled_from([2, 9])), "llm": 9}
    return recipe, {name: {"salt": salts[name], **narrow} for name in names}


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(drafting())
async def test_any_way_of_drafting_gives_the_text_of_the_model_that_checks(
    made: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    recipe, options = made
    shown: dict[int, list[int]] = {}
    prompts = {seed: [1, 40, 50, 60 + seed] for seed in range(5)}

    async def stream(router: Router, seed: int) -> None:
        try:
            events = await streamed(router, prompts[seed], max_tokens=24, ignore_eos=True, seed=seed)
        except RouteFailed:
            # A token that is dropped for a draft that is wrong again: the same wrong one for ever.
            assert recipe["routes"]["llm"][0]["send"] == "drop_last"
            return
        shown[seed] = [token.id for event in events for token in event.tokens]
        assert events[-1].completion is not None
        assert events[-1].completion.token_ids == shown[seed]

    with tempfile.TemporaryDirectory() as folder, watched():
        async with (
            Router(toy_recipe(Path(folder), recipe, **options)) as router,
            anyio.create_task_group() as tasks,
        ):
            for seed in prompts:
                tasks.start_soon(stream, router, seed)
    assert shown == {seed: greedy(prompts[seed], 9, 24) for seed in shown}
    assert len(shown) == len(prompts) or recipe["routes"]["llm"][0]["send"] == "drop_last"


def drafting_much(rollback: int, rules: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A recipe whose small model drafts by these rules."""
    return {
        "rollback": rollback,
        "models": {"slm": {}, "llm": {"verify": True}},
        "routes": {"slm": rules, "llm": [{"after": 1, "to": "slm", "send": "keep"}]},
        **more,
    }


@pytest.mark.parametrize(
    ("rollback", "rules"),
    [
        (2, [{"after": 4, "to": "llm", "send": "keep"}]),
        (1, [{"after": 4, "to": "llm", "send": "keep"}]),
        (3, [{"when": "entropy > 0.9", "to": "llm", "send": "keep"}]),
        (3, [{"when": "entropy > 0.45", "to": "llm", "send": "drop_last"}]),
        (3, []),
    ],
)
async def test_what_may_be_tentative_is_checked_before_more_is_written(
    tmp_path: Path, rollback: int, rules: list[dict[str, Any]]
) -> None:
    """Whatever the rules say of it, or nothing."""
    recipe = toy_recipe(tmp_path, drafting_much(rollback, rules), slm={"salt": 1}, llm={"salt": 2})
    async with Router(recipe) as router:
        events = await streamed(router, PROMPT, max_tokens=30, ignore_eos=True)
    completion = events[-1].completion
    assert completion is not None
    assert completion.token_ids == greedy(PROMPT, 2, 30)
    assert max(len(event.tokens) for event in events) <= rollback + 1


async def test_a_step_is_checked_at_its_end_whether_a_rule_says_so_or_not(alone: Recorded) -> None:
    recipe = {
        **drafting_much(60, [{"when": "entropy > 0.99", "to": "llm", "send": "keep"}], rollback_to=" "),
        "name": "steps",
        "entry": "slm",
        "models": {
            "slm": {"path": str(DEMO / "small"), "dtype": "float32"},
            "llm": {"path": str(DEMO / "large"), "dtype": "float32", "verify": True},
        },
    }
    async with Router(recipe) as router:
        for index in (0, 1, 5, 6):
            whole = await router.generate(alone.prompts[index], max_tokens=300)
            assert tuple(whole.token_ids) == alone.traces[r_stitch(-1.0), index].tokens[:300]


async def test_what_one_model_has_drafted_is_checked_before_the_next_one_drafts_more(tmp_path: Path) -> None:
    """The rule that leads to the third model gives way, and so do the rules of a route in Python."""
    recipe = drafting_much(2, [{"after": 2, "to": "mid", "send": "keep"}])
    recipe["models"] = {"slm": {}, "mid": {}, "llm": {"verify": True}}
    recipe["routes"]["slm"].append({"when": "position % 3 == 0", "to": "mid", "send": "keep"})
    recipe["routes"]["mid"] = [{"after": 9, "to": "slm", "send": "keep"}]
    options = {"slm": {"salt": 1}, "mid": {"salt": 3}, "llm": {"salt": 2}}
    async with Router(toy_recipe(tmp_path, recipe, **options)) as router:
        completion = await router.generate(PROMPT, max_tokens=30, ignore_eos=True)
    assert completion.token_ids == greedy(PROMPT, 2, 30)


async def test_same_weights_check_every_draft_through(tmp_path: Path) -> None:
    recipe = {
        "rollback": 4,
        "models": {"slm": {}, "llm": {"verify": True}},
        "routes": {
            "slm": [{"after": 4, "to": "llm", "send": "keep"}],
            "llm": [{"after": 1, "to": "slm", "send": "keep"}],
        },
    }
    async with Router(toy_recipe(tmp_path, recipe, slm={"salt": 1}, llm={"salt": 1})) as router:
        completion = await router.generate(PROMPT, max_tokens=20, ignore_eos=True)
    assert completion.models == (["slm"] * 4 + ["llm"]) * 4
    assert completion.usage.dropped == 0
    assert completion.token_ids == greedy(PROMPT, 1, 20)


def forgetful(prompt: list[int], back: int, count: int, run: int = 5) -> tuple[list[int], list[str]]:
    """The small model writes a run, the last ``back`` tokens are taken back, the large model writes one."""
    tokens, writers = list(prompt), []
    while len(writers) < count + 4:
        for model, salt, times in (("slm", 1, run), ("llm", 2, 1)):
            for _ in range(times):
                tokens.append(int(toy_logits(tokens, 128, salt)[:100].argmax()))
                writers.append(model)
            if model == "slm":
                del tokens[len(tokens) - back :], writers[len(writers) - back :]
    return tokens[len(prompt) :][:count], writers[:count]


@pytest.mark.parametrize(("run", "back"), [(5, 0), (5, 1), (5, 2), (5, 4), (4, 4), (3, 3), (1, 1), (2, 2)])
async def test_a_receive_takes_tokens_back_within_the_rollback(tmp_path: Path, run: int, back: int) -> None:
    recipe = toy_recipe(tmp_path, handoffs.forgetful, slm={"salt": 1}, llm={"salt": 2})
    params = {"run": run, "back": back}
    request: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "params": params}
    async with Router(recipe) as router:
        completion = await router.generate(PROMPT, **request)
        events = await streamed(router, PROMPT, **request)
    tokens, writers = forgetful(PROMPT, back, 24, run)
    assert (completion.token_ids, completion.models) == (tokens, writers)
    assert [token.id for event in events for token in event.tokens] == tokens
    assert "".join(event.text for event in events) == completion.text
    assert (completion.usage.dropped > 0) == (back > 0)


async def test_a_receive_takes_back_whether_memory_is_short_or_not(tmp_path: Path) -> None:
    """A request that is preempted on its way to a model is received there all the same."""
    log, prompts = Log(), {seed: [1, 40, 50, 20 + seed] for seed in range(16)}
    recipe = toy_recipe(
        tmp_path,
        handoffs.forgetful,
        slm={"salt": 1, "kv_capacity": 100},
        llm={"salt": 2, "kv_capacity": 100},
    )
    async with Router(recipe, observer=log) as router:
        completions = await answers(router, prompts, 16, max_tokens=24, ignore_eos=True, params={"back": 3})
    for seed, completion in completions.items():
        tokens, writers = forgetful(prompts[seed], 3, 24)
        assert (completion.token_ids, completion.models) == (tokens, writers)
    assert any(opened.epoch for _, step, _ in log.steps for opened in step.open), "nothing was preempted"


async def test_a_request_that_gets_no_further_is_an_error_though_it_commits(tmp_path: Path) -> None:
    """What is written between two visits is taken back every time."""
    recipe = toy_recipe(tmp_path, handoffs.pointless, slm={"salt": 1}, llm={"salt": 2})
    with anyio.fail_after(20):
        async with Router(recipe) as router:
            with pytest.raises(
                RouteFailed, match="'pointless': model 'slm' hands output position 0 to 'llm', which"
            ):
                await router.generate(PROMPT, max_tokens=24, ignore_eos=True)


async def test_a_request_that_only_ever_takes_back_is_an_error(tmp_path: Path) -> None:
    """Two tokens are written, three are taken back and one is written, for ever."""
    recipe = toy_recipe(tmp_path, handoffs.forgetful, slm={"salt": 1}, llm={"salt": 2})
    params = {"run": 2, "back": 3}
    with anyio.fail_after(20):
        async with Router(recipe) as router:
            with pytest.raises(
                RouteFailed, match=r"'forgetful': model 'llm' takes tokens back at output pos"
            ):
                await router.generate(PROMPT, max_tokens=24, ignore_eos=True, params=params)


async def test_a_check_that_drops_its_own_token_for_ever_is_an_error(tmp_path: Path) -> None:
    recipe = {
        "rollback": 4,
        "models": {"slm": {}, "llm": {"verify": True}},
        "routes": {
            "slm": [{"after": 4, "to": "llm", "send": "keep"}],
            "llm": [{"when": "true", "to": "slm", "send": "drop_last"}],
        },
    }
    with anyio.fail_after(20):
        async with Router(toy_recipe(tmp_path, recipe, slm={"salt": 1}, llm={"salt": 2})) as router:
            with pytest.raises(RouteFailed, match=r"hands output position . to 'llm', which already gave"):
                await router.generate(PROMPT, max_tokens=24, ignore_eos=True)


async def test_a_check_may_drop_its_own_token_where_the_draft_was_right(tmp_path: Path) -> None:
    """The tokens that it has checked are final, and are not checked again."""
    recipe = {
        "rollback": 4,
        "models": {"slm": {}, "llm": {"verify": True}},
        "routes": {
            "slm": [{"after": 4, "to": "llm", "send": "keep"}],
            "llm": [{"when": "true", "to": "slm", "send": "drop_last"}],
        },
    }
    async with Router(toy_recipe(tmp_path, recipe, slm={"salt": 1}, llm={"salt": 1})) as router:
        events = await streamed(router, PROMPT, max_tokens=20, ignore_eos=True)
    completion = events[-1].completion
    assert completion is not None
    assert completion.token_ids == greedy(PROMPT, 1, 20)
    assert completion.models == ["slm"] * 20
    assert [len(event.tokens) for event in events] == [4] * 5


async def test_a_receive_that_takes_back_what_is_final_is_an_error(tmp_path: Path) -> None:
    recipe = toy_recipe(tmp_path, handoffs.forgetful, slm={"salt": 1}, llm={"salt": 2})
    async with Router(recipe) as router:
        with pytest.raises(RouteFailed, match=r"receive of model 'llm'.* are final: a recipe declares"):
            await router.generate(PROMPT, max_tokens=24, ignore_eos=True, params={"back": 5})
        assert len((await router.generate(PROMPT, max_tokens=4, params={"back": 1})).tokens) == 4
