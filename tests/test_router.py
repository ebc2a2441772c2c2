"""The router end to end, over toy models in real worker processes."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes import ALWAYS, recipe_of, toy_model, toy_pair
from tests.toy.engine import toy_logits
from tokenflow.errors import (
    ContextTooLong,
    InvalidRequest,
    ModelLoadError,
    NonFiniteLogits,
    RequestCancelled,
    RouteFailed,
    RouterClosed,
    TokenizerMismatch,
    WorkerDied,
)
from tokenflow.router import Router
from tokenflow.types import Completion, StreamEvent
from tokenflow.wire.messages import Step, StepDone

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_nursery")]

PROMPT = [1, 40, 50, 60]
VOCAB_LIMIT = 100


def expected_pair(prompt: list[int], count: int) -> tuple[list[int], list[str]]:
    """What :func:`toy_pair` answers, written as one loop over one request."""
    from tokenflow.routing.signals import Signals

    tokens, models, at = list(prompt), [], "slm"
    while len(models) < count:
        logits = toy_logits(tokens, 128, {"slm": 1, "llm": 2}[at])
        token = int(logits[:VOCAB_LIMIT].argmax())
        uncertain = Signals(logits[None], torch.tensor([token])).entropy().item() > 0.4
        if at == "slm" and uncertain:
            at = "llm"
            continue
        tokens.append(token)
        models.append(at)
        if token == 2:
            break
        if at == "llm" and not uncertain:
            at = "slm"
    return tokens[len(prompt) :], models


class Log:
    """Every step that workers ran."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, Step, StepDone]] = []
        self._news = asyncio.Event()

    def __call__(self, model: str, step: Step, done: StepDone) -> None:
        self.steps.append((model, step, done))
        self._news.set()

    @property
    def open_handles(self) -> set[tuple[str, int]]:
        """(model, handle) of what workers hold now."""
        handles: set[tuple[str, int]] = set()
        for model, step, _ in self.steps:
            handles -= {(model, handle) for handle in step.drop}
            handles |= {(model, opened.handle) for opened in step.open}
        return handles

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a step after which ``condition`` holds."""
        async with asyncio.timeout(20):
            while not condition():
                self._news.clear()
                await self._news.wait()


async def test_a_request_goes_back_and_forth_as_its_rules_say(tmp_path: Path) -> None:
    async with Router(toy_pair(tmp_path)) as router:
        answer = await router.generate(PROMPT, max_tokens=40)
    assert (answer.token_ids, answer.models) == expected_pair(PROMPT, 40)
    assert {"slm", "llm"} == set(answer.models)
    assert answer.usage.by_model == {name: answer.models.count(name) for name in ("slm", "llm")}
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == len(answer.tokens)


async def test_answers_do_not_depend_on_company_thresholds_or_memory(tmp_path: Path) -> None:
    prompts = [[1, 40 + i % 30, 50, 20 + i] for i in range(24)]
    expected = [expected_pair(prompt, 30) for prompt in prompts]
    recipe = toy_pair(
        tmp_path,
        slm={"kv_capacity": 120, "block_size": 4},
        llm={"kv_capacity": 200},
        thresholds={"slm": 2, "llm": 5},
    )
    async with Router(recipe) as router:
        answers = await router.generate_many(prompts, concurrency=16, max_tokens=30)
    assert [(answer.token_ids, answer.models) for answer in answers] == expected


async def test_a_preempted_request_is_rebuilt_and_answers_the_same(tmp_path: Path) -> None:
    """Three requests fit at most; sixteen are sent."""
    log = Log()
    recipe = toy_pair(tmp_path, slm={"kv_capacity": 110}, llm={"kv_capacity": 110})
    prompts = [[1, 40, 50, 20 + i] for i in range(16)]
    async with Router(recipe, observer=log) as router:
        answers = await router.generate_many(prompts, concurrency=16, max_tokens=30)
    assert [(answer.token_ids, answer.models) for answer in answers] == [
        expected_pair(prompt, 30) for prompt in prompts
    ]
    rebuilt = [opened for _, step, _ in log.steps for opened in step.open if opened.epoch]
    assert rebuilt, "nothing was preempted: the test does not test"


async def test_a_worker_is_sent_each_token_once_and_in_order(tmp_path: Path) -> None:
    log = Log()
    async with Router(toy_pair(tmp_path), observer=log) as router:
        answer = await router.generate(PROMPT, max_tokens=40)
    for name in ("slm", "llm"):
        sent = [t for model, step, _ in log.steps if model == name for row in step.rows for t in row.tokens]
        full = [*PROMPT, *answer.token_ids]
        assert sent == full[: len(sent)]
        assert len(sent) < len(full)


async def test_a_finished_request_is_dropped_by_every_worker(tmp_path: Path) -> None:
    log = Log()
    async with Router(toy_pair(tmp_path), observer=log) as router:
        await router.generate_many([PROMPT, [1, 44]], max_tokens=20)
        await log.until(lambda: not log.open_handles)


def test_overrides_that_could_not_take_effect_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a compiled recipe takes no overrides"):
        Router(toy_pair(tmp_path), overrides=["params.tau=0.1"])
    with pytest.raises(TypeError, match=r"overrides is a list of .* strings, got one string"):
        Router("recipes/demo.yaml", overrides="params.tau=0.1")


@pytest.fixture(scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    folder = tmp_path_factory.mktemp("pair")
    recipe = toy_pair(folder, slm={"context_length": 100, "nan_first": 97}, llm={"context_length": 80})
    async with Router(recipe) as router:
        yield router


async def test_a_stream_adds_up_to_the_completion(pair: Router) -> None:
    whole = await pair.generate(PROMPT, max_tokens=30)
    events = [event async for event in pair.stream(PROMPT, max_tokens=30)]
    assert "".join(event.text for event in events) == whole.text
    assert tuple(token for event in events for token in event.tokens) == whole.tokens
    assert [event.completion is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert len(events) > 5


@pytest.mark.parametrize("every", [1, 4, 40])
async def test_what_is_poured_is_what_is_iterated_however_often_it_waits(pair: Router, every: int) -> None:
    """A sink that is ready for so many events, and then takes a moment."""
    whole = await pair.generate(PROMPT, max_tokens=30)
    events: list[StreamEvent] = []
    pauses = 0

    def ready() -> bool:
        return len(events) < (pauses + 1) * every

    async with pair.stream(PROMPT, max_tokens=30) as response:
        while await response.pour(events.append, ready):
            pauses += 1
            await asyncio.sleep(0)
        assert not await response.pour(events.append, lambda: True), "it is over"
    assert "".join(event.text for event in events) == whole.text
    assert tuple(token for event in events for token in event.tokens) == whole.tokens
    assert [event.completion is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert pauses >= (len(events) - 1) // every


async def test_a_poured_token_wakes_nobody_up(pair: Router) -> None:
    """The sink is called by who commits, all but the first time and the last."""
    task, callers = asyncio.current_task(), list[bool]()
    async with pair.stream(PROMPT, max_tokens=30) as response:
        await response.pour(lambda event: callers.append(asyncio.current_task() is task), lambda: True)
    assert len(callers) > 5
    assert sum(callers) <= 2 and callers[-1]


async def test_a_sink_that_fails_ends_its_own_response_only(pair: Router) -> None:
    whole = await pair.generate(PROMPT, max_tokens=30)
    taken = 0

    def fail(event: StreamEvent) -> None:
        nonlocal taken
        taken += 1
        if taken == 3:
            raise LookupError("no more of it")

    other = asyncio.ensure_future(pair.generate(PROMPT, max_tokens=30))
    async with pair.stream(PROMPT, max_tokens=30) as response:
        with pytest.raises(LookupError, match="no more of it"):
            await response.pour(fail, lambda: True)
    assert taken == 3
    assert await other == replace(whole, timing=(await other).timing, seed=(await other).seed)


async def test_a_seeded_request_repeats_alone_and_in_company(pair: Router) -> None:
    settings: dict[str, Any] = {"max_tokens": 30, "temperature": 0.9, "top_p": 0.95, "seed": 1234}
    alone = await pair.generate(PROMPT, **settings)
    others = [[1, 30 + i, 60] for i in range(15)]

    async def crowd() -> None:
        await asyncio.gather(*(pair.generate(p, max_tokens=40, temperature=1.0) for p in others))

    crowded, _ = await asyncio.gather(pair.generate(PROMPT, **settings), crowd())
    again = await pair.generate(PROMPT, **settings)
    other = await pair.generate(PROMPT, **{**settings, "seed": 99})
    assert (alone.token_ids, alone.models) == (crowded.token_ids, crowded.models)
    assert (alone.token_ids, alone.models) == (again.token_ids, again.models)
    assert other.token_ids != alone.token_ids


async def test_an_unseeded_request_tells_the_seed_that_repeats_it(pair: Router) -> None:
    first = await pair.generate(PROMPT, max_tokens=20, temperature=1.0)
    second = await pair.generate(PROMPT, max_tokens=20, temperature=1.0, seed=first.seed)
    assert first.token_ids == second.token_ids


async def test_a_stop_string_over_several_models_is_never_shown(pair: Router) -> None:
    whole = await pair.generate(PROMPT, max_tokens=30)
    change = next(i for i in range(3, 29) if whole.models[i] != whole.models[i - 1])
    stop = whole.text[change - 1 : change + 1]
    answer = await pair.generate(PROMPT, max_tokens=30, stop=stop)
    assert answer.finish_reason == "stop"
    assert answer.text == whole.text[: whole.text.index(stop)]
    streamed = [event.text async for event in pair.stream(PROMPT, max_tokens=30, stop=[stop])]
    assert "".join(streamed) == answer.text


async def test_stop_token_ids_end_a_response_and_are_not_shown(pair: Router) -> None:
    whole = await pair.generate(PROMPT, max_tokens=30)
    stop = whole.token_ids[10]
    first = whole.token_ids.index(stop)
    answer = await pair.generate(PROMPT, max_tokens=30, stop_token_ids=[stop])
    assert answer.token_ids == whole.token_ids[: first + 1]
    assert answer.text == "".join(token.text for token in whole.tokens[:first])
    assert answer.finish_reason == "stop"


async def test_penalties_count_committed_tokens_whichever_model_wrote_them(pair: Router) -> None:
    answer = await pair.generate(PROMPT, max_tokens=60, frequency_penalty=2, presence_penalty=2)
    assert answer.usage.dropped, "no token was discarded: the test does not test"
    tokens = list(PROMPT)
    for token in answer.tokens:
        logits = toy_logits(tokens, 128, {"slm": 1, "llm": 2}[token.model])[:VOCAB_LIMIT].clone()
        for seen in set(tokens[len(PROMPT) :]):
            logits[seen] -= 2 + 2 * tokens[len(PROMPT) :].count(seen)
        assert token.id == int(logits.argmax())
        tokens.append(token.id)


async def test_logprobs_are_reported_for_each_token_by_the_model_that_wrote_it(pair: Router) -> None:
    answer = await pair.generate(PROMPT, max_tokens=20, logprobs=True, top_logprobs=3)
    tokens = list(PROMPT)
    for token in answer.tokens:
        logits = toy_logits(tokens, 128, {"slm": 1, "llm": 2}[token.model])
        logits[VOCAB_LIMIT:] = float("-inf")
        expected = logits.log_softmax(-1)
        assert token.logprob == pytest.approx(expected[token.id].item(), abs=1e-5)
        assert [top.id for top in token.top_logprobs] == expected.topk(3).indices.tolist()
        tokens.append(token.id)


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "message"),
    [
        ("", {}, InvalidRequest, "the prompt is empty; give at least one character"),
        ([], {}, InvalidRequest, "the prompt is empty; give at least one token or message"),
        ([1, 200], {}, InvalidRequest, "token id 200 at index 1 is out of range: the tokenizer has 100 ids"),
        ([1, -1], {}, InvalidRequest, "token id -1 at index 1 is out of range: the tokenizer has 100 ids"),
        ([1, "a"], {}, InvalidRequest, "a prompt is a text, a list of token ids or a list of chat messages"),
        ([5] * 80, {}, ContextTooLong, "the prompt has 80 tokens, but the recipe's smallest context"),
        ([5] * 5000, {}, ContextTooLong, "the prompt has 5000 tokens"),
        ([5] * 70, {"max_tokens": 11}, ContextTooLong, "70 tokens and max_tokens 11 exceed"),
        ([5], {"max_tokens": 0}, InvalidRequest, "max_tokens must be a 64-bit integer of at least 1, got 0"),
        ([5], {"temperature": -1}, InvalidRequest, "temperature must be at least 0, got -1"),
        ([5], {"top_p": 1.5}, InvalidRequest, "top_p must be between 0 and 1, got 1.5"),
        ([5], {"params": {"tua": 1}}, InvalidRequest, "the recipe has no parameter 'tua'; it has: none"),
    ],
)
async def test_a_wrong_request_is_refused_and_its_neighbour_unharmed(
    pair: Router, prompt: Any, sampling: dict[str, Any], error: type[Exception], message: str
) -> None:
    neighbour = asyncio.ensure_future(pair.generate(PROMPT, max_tokens=20))
    with pytest.raises(error) as caught:
        await pair.generate(prompt, **sampling)
    assert message in str(caught.value)
    answer = await neighbour
    assert (answer.token_ids, answer.models) == expected_pair(PROMPT, 20)


async def test_a_prompt_one_short_of_the_context_gets_one_token(pair: Router) -> None:
    answer = await pair.generate([5] * 79)
    assert len(answer.tokens) == 1
    assert answer.finish_reason in ("length", "stop")


async def test_nan_logits_fail_their_request_only(pair: Router) -> None:
    good = [pair.generate([1, 30 + i], max_tokens=15) for i in range(4)]
    bad = pair.generate([97, 1], max_tokens=15)
    *answers, failure = await asyncio.gather(*good, bad, return_exceptions=True)
    assert isinstance(failure, NonFiniteLogits)
    assert "model 'slm' gave NaN or infinite logits at output position 0" in str(failure)
    for i, answer in enumerate(answers):
        assert isinstance(answer, Completion)
        assert answer.token_ids == expected_pair([1, 30 + i], 15)[0]


async def test_logits_wider_than_the_tokenizer_are_accepted_and_never_sampled(pair: Router) -> None:
    answers = await pair.generate_many([[1, 30 + i] for i in range(8)], max_tokens=30, temperature=2.0)
    assert all(token < VOCAB_LIMIT for answer in answers for token in answer.token_ids)


async def test_a_cancelled_request_leaves_every_worker(tmp_path: Path) -> None:
    """Cancelled while queued, running, and pending at a peer: whatever it is in, it goes."""
    log = Log()
    recipe = toy_pair(tmp_path, slm={"step_s": 0.002, "max_requests": 4}, llm={"step_s": 0.004})
    async with Router(recipe, observer=log) as router:
        tasks = [asyncio.ensure_future(router.generate([1, 40 + i], max_tokens=200)) for i in range(8)]
        await log.until(lambda: len(log.steps) > 40)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(result, asyncio.CancelledError) for result in results)
        await log.until(lambda: not log.open_handles)
        answer = await router.generate(PROMPT, max_tokens=20)
        assert (answer.token_ids, answer.models) == expected_pair(PROMPT, 20)


async def test_a_dropped_stream_cancels_its_request(tmp_path: Path) -> None:
    log = Log()
    async with Router(toy_pair(tmp_path, slm={"step_s": 0.002}), observer=log) as router:
        async for event in router.stream(PROMPT, max_tokens=500):
            assert event.tokens
            break
        gc.collect()
        await log.until(lambda: not log.open_handles)
    assert sum(len(done.rows) for _, _, done in log.steps) < 100


async def test_a_second_task_that_waits_for_a_response_is_refused_and_the_first_goes_on(pair: Router) -> None:
    whole = await pair.generate(PROMPT, max_tokens=30)
    response = pair.stream(PROMPT, max_tokens=30)
    async with asyncio.timeout(10):
        first, second = await asyncio.gather(
            response.completion(), response.completion(), return_exceptions=True
        )
    assert not isinstance(first, BaseException) and first.text == whole.text
    assert isinstance(second, RuntimeError) and "another task waits" in str(second)


async def test_two_tasks_that_begin_one_response_make_one_request_of_it(
    pair: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow.router.is_long", lambda prompt: True)  # so that it is read in a thread
    response = pair.stream(PROMPT, max_tokens=4)
    async with asyncio.timeout(10):
        first, second = await asyncio.gather(response.begin(), response.begin(), return_exceptions=True)
    assert first is None and isinstance(second, RuntimeError) and "another task waits" in str(second)
    assert (await response.completion()).usage.completion_tokens == 4


async def test_a_response_that_was_closed_before_it_began_never_begins(pair: Router) -> None:
    response = pair.stream(PROMPT, max_tokens=4)
    response.close()
    with pytest.raises(RequestCancelled, match="closed before it began"):
        await response.completion()
    assert pair.load.running == 0


async def test_a_response_that_is_closed_while_its_prompt_is_read_never_begins(
    pair: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow.router.is_long", lambda prompt: True)  # so that it is read in a thread
    response = pair.stream(PROMPT, max_tokens=4)
    beginning = asyncio.create_task(response.begin())
    await asyncio.sleep(0)
    response.close()
    with pytest.raises(RequestCancelled, match="closed before it began"):
        await beginning
    assert pair.load.running == 0


async def test_a_router_is_used_and_left_in_the_event_loop_that_it_was_entered_in(pair: Router) -> None:
    def elsewhere(ask: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        with pytest.raises(RuntimeError, match="entered in another event loop: use it there"):
            asyncio.run(asyncio.wait_for(ask(), 10))

    for ask in (
        lambda: pair.generate(PROMPT, max_tokens=4),
        lambda: pair.score(PROMPT),
        lambda: pair.__aexit__(None, None, None),
    ):
        await asyncio.to_thread(elsewhere, ask)
    assert (await pair.generate(PROMPT, max_tokens=4)).usage.completion_tokens == 4


async def test_a_livelock_is_an_error_that_names_recipe_model_and_position(tmp_path: Path) -> None:
    models = (toy_model(tmp_path, "a", 1, salt=1), toy_model(tmp_path, "b", 2, salt=2))
    recipe = recipe_of(models, {"a": ((ALWAYS, "b", "drop_last"),), "b": ((ALWAYS, "a", "drop_last"),)})
    async with Router(recipe) as router:
        with pytest.raises(RouteFailed) as caught:
            await router.generate(PROMPT, max_tokens=10)
    assert str(caught.value) == (
        "recipe 'toy': model 'b' hands output position 0 to 'a', which already gave that position up: the "
        "request would bounce for ever; one of their rules must send: keep"
    )


async def test_a_chain_of_three_models_may_pass_one_position_on(tmp_path: Path) -> None:
    models = tuple(toy_model(tmp_path, name, code, salt=code) for code, name in enumerate("abc", 1))
    recipe = recipe_of(
        models,
        {
            "a": ((ALWAYS, "b", "drop_last"),),
            "b": ((ALWAYS, "c", "drop_last"),),
            "c": ((ALWAYS, "a", "keep"),),
        },
    )
    async with Router(recipe) as router:
        answer = await router.generate(PROMPT, max_tokens=6)
    assert answer.models == ["c"] * 6
    assert answer.usage.dropped == 12


async def test_a_kept_token_that_ends_the_response_is_not_handed_on(tmp_path: Path) -> None:
    log = Log()
    models = (toy_model(tmp_path, "a", 1, salt=1), toy_model(tmp_path, "b", 2, salt=2))
    recipe = recipe_of(models, {"a": ((ALWAYS, "b", "keep"),), "b": ((ALWAYS, "a", "keep"),)})
    async with Router(recipe, observer=log) as router:
        answer = await router.generate(PROMPT, max_tokens=3)
    assert answer.models == ["a", "b", "a"]
    assert answer.usage.handoffs == 2
    assert sum(len(step.rows) for _, step, _ in log.steps) == 3


async def test_a_long_prompt_is_fed_in_chunks_and_its_neighbours_go_on(tmp_path: Path) -> None:
    log = Log()
    recipe = recipe_of((toy_model(tmp_path, "m", 1, salt=1),), {})
    config = recipe.models[0].config
    object.__setattr__(config, "max_batch_tokens", 16)
    async with Router(recipe, observer=log) as router:
        stream = router.stream(PROMPT, max_tokens=60)
        first = await anext(stream)
        long = await router.generate([1, *range(30, 90)] * 4, max_tokens=2)
        rest = [event async for event in stream]
    tokens = [token.id for event in [first, *rest] for token in event.tokens]
    sequence = list(PROMPT)
    for token in tokens:
        assert token == int(toy_logits(sequence, 128, 1)[:VOCAB_LIMIT].argmax())
        sequence.append(token)
    assert len(long.tokens) == 2
    assert max(done.computed for _, _, done in log.steps) <= 16
    assert any({row.token >= 0 for row in done.rows} == {True, False} for _, _, done in log.steps), (
        "no step mixed a chunk with a decode"
    )


async def test_two_models_with_permuted_ids_are_refused_with_the_first_that_differs(tmp_path: Path) -> None:
    recipe = toy_pair(tmp_path)
    file = Path(recipe.models[1].config.path) / "tokenizer.json"
    data = json.loads(file.read_text())
    vocab = data["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(data))
    with pytest.raises(TokenizerMismatch, match=r"id \d+ is 'a' in slm and 'b' in llm"):
        async with Router(recipe):
            pass


async def test_a_model_with_fewer_logits_than_ids_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="'slm' has logits for 64 ids, fewer than the 100"):
        async with Router(toy_pair(tmp_path, slm={"vocab_size": 64})):
            pass


async def test_a_worker_that_fails_to_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="model 'llm': no such weights"):
        async with Router(toy_pair(tmp_path, llm={"fail_load": "no such weights"})):
            pass


async def test_a_worker_that_dies_while_loading_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied) as caught:
        async with Router(toy_pair(tmp_path, llm={"die_loading": 7})):
            pass
    assert "worker of model 'llm' (pid " in str(caught.value)
    assert "ended with exit code 7" in str(caught.value)
    assert "the toy engine dies while loading" in str(caught.value)


async def test_a_router_that_is_not_running_says_so(tmp_path: Path) -> None:
    router = Router(toy_pair(tmp_path))
    with pytest.raises(RouterClosed, match="is not running"):
        await router.generate(PROMPT)
    async with router:
        waiting = asyncio.ensure_future(router.generate(PROMPT, max_tokens=900))
        await asyncio.sleep(0)
    with pytest.raises((RequestCancelled, RouterClosed)):
        await waiting
    with pytest.raises(RouterClosed, match="stopped"):
        await router.generate(PROMPT)


async def test_an_error_inside_the_context_comes_out_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with Router(toy_pair(tmp_path)):
            raise ZeroDivisionError


async def test_a_router_entered_twice_says_so_and_goes_on(tmp_path: Path) -> None:
    router = Router(toy_pair(tmp_path))
    for _ in range(2):
        async with router:
            with pytest.raises(RuntimeError, match="running already"):
                async with router:
                    pass
            answer = await router.generate(PROMPT, max_tokens=10)
            assert (answer.token_ids, answer.models) == expected_pair(PROMPT, 10)
