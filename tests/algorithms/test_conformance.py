"""Checks that any runtime of token-level routing must pass, whatever its models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.algorithms.toys import EOS, toy_recipe
from tests.exactness import answers, judge
from tests.reference import rules
from tests.reference.cases import DEMO, TRIO, r_stitch
from tests.reference.record import Recorded
from tests.reference.reference import ReferenceModels
from tests.routing.heads.published import CiterNet, R2RNet, features, r2r_checkpoint, saved, scrambled
from tests.test_router import Log
from tokenflow.actors.system import ActorSystem
from tokenflow.dsl.messages import PeerReq
from tokenflow.errors import ModelLoadError
from tokenflow.router import Router
from tokenflow.routing.heads import load_head
from tokenflow.routing.signals import Signals
from tokenflow.types import Completion

pytestmark = pytest.mark.anyio

R_STITCH = DEMO.parent / "demo.yaml"
SHORT = 50


@pytest.fixture(scope="module")
def prompts(alone: Recorded) -> dict[int, list[int]]:
    """Some prompts whose answers are short, by any model."""
    short = [
        index
        for index in range(len(alone.prompts))
        if all(len(alone.traces[r_stitch(tau), index].tokens) < SHORT for tau in (-1.0, 1.0))
    ]
    return {index: alone.prompts[index] for index in short[:24:4]}


@cache
def reference(*models: tuple[str, str]) -> ReferenceModels:
    return ReferenceModels.load({name: DEMO / folder for name, folder in models})


async def answer(
    recipe: Path, prompts: Mapping[int, list[int]], *overrides: str, **request: Any
) -> dict[int, Completion]:
    async with Router(recipe, overrides=overrides) as router:
        return await answers(router, prompts, 6, max_tokens=200, **request)


def assert_only(
    model: str, completions: Mapping[int, Completion], expected: Mapping[int, Sequence[int]]
) -> None:
    """Every answer is the model's own greedy text, all of it written by that model."""
    assert {i: tuple(answer.token_ids) for i, answer in completions.items()} == {
        i: tuple(tokens) for i, tokens in expected.items()
    }
    assert {name for answer in completions.values() for name in answer.models} == {model}


def small_only(alone: Recorded, prompts: Mapping[int, Any]) -> dict[int, Sequence[int]]:
    return {index: alone.traces[r_stitch(1.0), index].tokens for index in prompts}


def large_only(alone: Recorded, prompts: Mapping[int, Any]) -> dict[int, Sequence[int]]:
    return {index: alone.traces[r_stitch(-1.0), index].tokens for index in prompts}


def alone_by(folder: str, prompts: Mapping[int, list[int]]) -> dict[int, Sequence[int]]:
    models = reference(("only", folder))
    return {i: models.run(rules.Alone("only"), prompt, 200).tokens for i, prompt in prompts.items()}


# R2R theta > 1 / theta <= 0: equals S-only / L-only greedy output.
async def test_r2r_at_its_extremes_is_one_model(prompts: dict[int, list[int]], alone: Recorded) -> None:
    never = await answer(DEMO / "r2r.yaml", prompts, "heads.divergence.threshold=1.5")
    assert_only("slm", never, small_only(alone, prompts))
    always = await answer(DEMO / "r2r.yaml", prompts, "heads.divergence.threshold=0")
    assert_only("llm", always, large_only(alone, prompts))


# CITER tau <= 0 / tau > 1: S-only / L-only.
async def test_citer_at_its_extremes_is_one_model(prompts: dict[int, list[int]], alone: Recorded) -> None:
    never = await answer(DEMO / "citer.yaml", prompts, params={"tau": 0.0})
    assert_only("slm", never, small_only(alone, prompts))
    always = await answer(DEMO / "citer.yaml", prompts, params={"tau": 1.5})
    assert_only("llm", always, large_only(alone, prompts))


# Co-LLM eta >= 1 / eta < 0: S-only (defer column masked) / L-only.
async def test_co_llm_at_its_extremes_is_one_model(prompts: dict[int, list[int]], alone: Recorded) -> None:
    never = await answer(DEMO / "co_llm.yaml", prompts, params={"eta": 1.0})
    assert_only("slm", never, alone_by("heads/collm_small", prompts))
    always = await answer(DEMO / "co_llm.yaml", prompts, params={"eta": -0.1})
    assert_only("llm", always, large_only(alone, prompts))


# R-Stitch tau >= 1 / tau < 0: S-only / L-only.
async def test_r_stitch_at_its_extremes_is_one_model(prompts: dict[int, list[int]], alone: Recorded) -> None:
    assert_only("slm", await answer(R_STITCH, prompts, params={"tau": 1.0}), small_only(alone, prompts))
    always = await answer(R_STITCH, prompts, params={"tau": -1.0})
    assert_only("llm", always, large_only(alone, prompts))
    assert {completion.usage.handoffs for completion in always.values()} == {1}


# ME one-hot weights: that model only.  (Equal weights over identical models: test_ensemble.py.)
@pytest.mark.parametrize("name", TRIO)
async def test_an_ensemble_of_one_weight_is_one_model(
    name: str, prompts: dict[int, list[int]], alone: Recorded
) -> None:
    weights = ", ".join(f"{model}: {int(model == name)}" for model in TRIO)
    completions = await answer(DEMO / "me.yaml", prompts, f"draw={{{weights}}}")
    known = {"slm": small_only, "llm": large_only}
    expected = known[name](alone, prompts) if name in known else alone_by(TRIO[name], prompts)
    assert_only(name, completions, expected)


# S and L the same weights, greedy: any threshold gives identical text.
@pytest.mark.parametrize(
    ("recipe", "folder", "overrides", "params"),
    [
        (DEMO / "r2r.yaml", "small", ("heads.divergence.threshold=0.01",), {}),
        (DEMO / "r2r.yaml", "small", ("heads.divergence.threshold=0.9",), {}),
        (DEMO / "citer.yaml", "small", (), {"tau": 0.5}),
        (DEMO / "citer.yaml", "small", (), {"tau": 0.999}),
        (DEMO / "co_llm.yaml", "heads/collm_small", (), {"eta": 0.01}),
        (DEMO / "co_llm.yaml", "heads/collm_small", (), {"eta": 0.5}),
        (R_STITCH, "small", (), {"tau": 0.01}),
        (R_STITCH, "small", (), {"tau": 0.2}),
    ],
)
async def test_the_same_weights_on_both_sides_give_the_text_of_one(
    recipe: Path,
    folder: str,
    overrides: tuple[str, ...],
    params: dict[str, float],
    prompts: dict[int, list[int]],
) -> None:
    path = f"models.llm.path={DEMO / folder}"
    completions = await answer(recipe, prompts, path, *overrides, params=params)
    expected = alone_by(folder, prompts)
    assert {i: tuple(answer.token_ids) for i, answer in completions.items()} == expected
    assert any(answer.usage.handoffs for answer in completions.values())


# Token accounting: outputs = sum committed by model; dropped tokens never counted or streamed.
async def test_tokens_are_counted_once_by_the_model_that_wrote_them(
    prompts: dict[int, list[int]],
) -> None:
    async with Router(DEMO / "r2r.yaml") as router:
        for prompt in prompts.values():
            events = [event async for event in router.stream(prompt, max_tokens=200)]
            whole = events[-1].completion
            assert whole is not None
            assert tuple(token for event in events for token in event.tokens) == whole.tokens
            assert whole.usage.completion_tokens == len(whole.tokens)
            assert whole.usage.by_model == {name: whole.models.count(name) for name in ("slm", "llm")}
            assert whole.usage.prompt_tokens == len(prompt)
            # In R2R every token of the large model takes the place of one that was dropped.
            assert whole.usage.dropped == whole.models.count("llm")


# Reference equality: a naive loop with a full prefill for each step, token by token.
async def test_an_answer_equals_a_naive_loop_run_now(prompts: dict[int, list[int]]) -> None:
    models = reference(("slm", "small"), ("mid", "mid"), ("llm", "large"))
    completions = await answer(DEMO / "cascade.yaml", prompts)
    for index, completion in completions.items():
        assert judge(models.run(rules.Cascade(0.03, 0.1), prompts[index], 200), completion) is None


# Suffix minimality: lengths sent to L + L's own tokens = L's final KV length + at most 1.
@pytest.mark.parametrize("name", ["r2r", "me", "cascade", "step_boundary"])
async def test_a_peer_is_sent_what_it_has_not_seen_and_nothing_twice(
    name: str, prompts: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int, PeerReq]] = []
    deliver = ActorSystem.deliver

    def spy(self: ActorSystem, sender: int, peer: int, sequence: Any, request: PeerReq) -> None:
        sent.append((sequence.id, peer, request))
        deliver(self, sender, peer, sequence, request)

    monkeypatch.setattr(ActorSystem, "deliver", spy)
    log = Log()
    async with Router(DEMO / f"{name}.yaml", observer=log) as router:
        completions = await answers(router, prompts, 1, max_tokens=200)
        names = [model.name for model in router.recipe.models]
    kv = {
        (row.handle, model): row.base + len(row.tokens) for model, step, _ in log.steps for row in step.rows
    }
    moved = {(handle, names[peer - 1]) for handle, peer, _ in sent}
    assert moved
    for handle, completion in enumerate(completions.values(), 1):
        for model in names:
            if (handle, model) not in moved or completion.models[0] == model:
                continue
            lengths = [len(r.token_ids) for h, peer, r in sent if (h, names[peer - 1]) == (handle, model)]
            known = sum(lengths) + completion.models.count(model)
            # Its own last token is known to it but not fed.
            assert known - kv[handle, model] in (0, 1), (model, lengths)


# EOS dropped on S: the request continues with L's token.
async def test_an_end_of_sequence_that_is_dropped_does_not_end(tmp_path: Path) -> None:
    recipe = toy_recipe(
        tmp_path,
        STITCH,
        slm={"script": [[EOS, 0.5], [10, 12], [EOS, 12]]},
        llm={"script": [[11, 12]]},
    )
    async with Router(recipe) as router:
        completion = await router.generate([1], max_tokens=20)
    assert (completion.token_ids, completion.models) == ([11, 10, EOS], ["llm", "slm", "slm"])
    assert completion.finish_reason == "stop"
    assert completion.usage.dropped == 1


# Finish on L: S releases, all peers are told, no KV leak.
async def test_an_end_on_the_large_model_is_the_end_everywhere(tmp_path: Path) -> None:
    log = Log()
    recipe = toy_recipe(
        tmp_path, STITCH, slm={"script": [[10, 12], [10, 0.5]]}, llm={"script": [[11, 12], [EOS, 12]]}
    )
    async with Router(recipe, observer=log) as router:
        completion = await router.generate([1], max_tokens=20)
        assert (completion.token_ids, completion.models) == ([10, EOS], ["slm", "llm"])
        assert completion.usage.handoffs == 1
        await log.until(lambda: not log.open_handles)
        assert router._system is not None and router._system.active == 0
    assert {model for model, step, _ in log.steps if step.open} == {"slm", "llm"}


# Router loader: a synthetic checkpoint loads, without the embedding table too; a wrong H is refused.
def test_the_loader_of_r2r_takes_published_checkpoints(tmp_path: Path) -> None:
    net = scrambled(R2RNet(24, [32] * 2))
    table = net.token_embeddings.weight.detach()
    inputs = features(16, 24)
    with torch.no_grad():
        expected = net(*inputs)
    for with_table in (True, False):
        file = saved(tmp_path / f"{with_table}.pt", r2r_checkpoint(net, table=with_table))
        head = load_head("r2r", file, embeddings=table, hidden_size=24, device="cpu")
        torch.testing.assert_close(head.score(*inputs), expected, rtol=0, atol=1e-5)
        assert head.threshold == 0.25
    with pytest.raises(ModelLoadError, match="24"):
        load_head("r2r", file, embeddings=torch.zeros(150, 32), hidden_size=32, device="cpu")


# CITER loader: folded and unfolded BatchNorm agree within 1e-5.
def test_the_loader_of_citer_folds_the_batch_norm(tmp_path: Path) -> None:
    net = scrambled(CiterNet(24))
    head = load_head(
        "citer",
        saved(tmp_path / "mlp.pth", net.state_dict()),
        embeddings=torch.empty(0, 0),
        hidden_size=24,
        device="cpu",
    )
    inputs = features(64, 24)
    with torch.no_grad():
        torch.testing.assert_close(head.score(*inputs), net(inputs[0]), rtol=0, atol=1e-5)


# Entropy: known values, masked columns, bf16 input.
def test_entropy_is_normalised_by_the_full_width() -> None:
    inf = math.inf
    rows = [[0.0, 0, 0, 0], [10, 0, 0, 0], [2, 1, 0, -1], [5, 5, -inf, -inf], [1000, 0, 0, 0]]
    known = [1.0, 0.001081, 0.683503, 0.5, 0.0]
    for width in (torch.float32, torch.bfloat16):
        signals = Signals(torch.tensor(rows, dtype=width), torch.zeros(5, dtype=torch.int64))
        assert signals.entropy().tolist() == pytest.approx(known, abs=1e-6)
    masked = Signals(
        torch.tensor([[5.0, 5.0, 9.0, -inf]]), torch.zeros(1, dtype=torch.int64), excluded=torch.tensor([2])
    )
    assert masked.entropy().item() == pytest.approx(0.5, abs=1e-6)


STITCH = {
    "params": {"tau": 0.4},
    "routes": {
        "slm": [{"when": "entropy > tau", "to": "llm", "send": "drop_last"}],
        "llm": [{"when": "entropy <= tau", "to": "slm", "send": "keep"}],
    },
}
