"""The trained heads of the demo models against the code that trained them, on real hidden states."""

from __future__ import annotations

import json
import operator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.demo import heads as trained
from recipes.demo.decoder import Decoder, Features, pad
from recipes.demo.policies import Step
from recipes.demo.tasks import problems
from recipes.demo.tokenizer import answer_ids, prompt_ids
from tokenflow.routing.heads import CoLLMHead, Head, load_head

DEMO = Path(trained.__file__).parent
FOLDER = DEMO / "heads"
COMPARE = {">=": operator.ge, ">": operator.gt, "<": operator.lt}

CHECKPOINTS = {
    "r2r": (FOLDER / "r2r/default_router.pt", FOLDER / "r2r/default_router_all.pt", FOLDER / "r2r"),
    "citer": (FOLDER / "citer/citer_mlp.pth", FOLDER / "citer"),
    "co_llm": (FOLDER / "collm_small",),
}


@cache
def decoder(kind: str) -> Decoder:
    return Decoder(FOLDER / "collm_small" if kind == "co_llm" else DEMO / "small")


@cache
def step(kind: str) -> Step:
    """The small model at every position of a few worked answers."""
    asked = problems(3, 77)
    sequences = [prompt_ids(problem.question) + answer_ids(problem.answer) for problem in asked]
    ids, small = pad(sequences), decoder(kind)
    small.open(*ids.shape)
    every = small.forward(ids, torch.arange(ids.shape[1]).expand_as(ids))
    real = torch.arange(ids.shape[1]) < torch.tensor([len(sequence) for sequence in sequences])[:, None]
    at = Features(every.hidden[real], every.logits[real])
    tokens = at.logits[:, : small.defer_id].argmax(-1)
    nowhere = torch.zeros(len(tokens), dtype=torch.bool)
    return Step(at.hidden, at.logits, tokens, at.logits, tokens, nowhere)


def load(kind: str, path: Path) -> Head:
    embeddings = decoder(kind).embedding
    return load_head(kind, path, embeddings=embeddings, hidden_size=embeddings.shape[1], device="cpu")


def score(kind: str, path: Path) -> torch.Tensor:
    at = step(kind)
    return load(kind, path).score(at.hidden, at.small_tokens, at.small_logits)


def stored() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "heads.json").read_text()))


def cases() -> list[tuple[str, Path]]:
    return [(kind, path) for kind, paths in CHECKPOINTS.items() for path in paths]


@pytest.mark.parametrize(("kind", "path"), cases())
def test_a_demo_head_scores_as_in_training_and_asks_at_the_same_tokens(kind: str, path: Path) -> None:
    at, scores = step(kind), score(kind, path)
    assert len(scores) > 1000
    threshold = stored()["collm" if kind == "co_llm" else kind]["threshold"]
    with torch.no_grad():
        if kind == "r2r":
            net = trained.load_r2r(FOLDER / "r2r/default_router_all.pt", decoder(kind).embedding)
            largest = trained.top_logits(at.small_logits)
            expected = net(at.hidden, at.small_tokens, largest).sigmoid()
            rule = trained.r2r(net, threshold)
        elif kind == "citer":
            confidence = trained.load_citer(FOLDER / "citer/citer_mlp.pth")
            expected, rule = confidence(at.hidden), trained.citer(confidence, threshold)
        else:
            expected = at.small_logits[:, decoder(kind).config.defer_token_id].sigmoid()
            rule = trained.co_llm(decoder(kind).config.defer_token_id, threshold)
        asked = rule(at).large
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    assert torch.equal(COMPARE[load(kind, path).comparison](scores, threshold), asked)
    assert 0.01 < asked.float().mean() < 0.5


def test_thresholds_are_those_that_training_wrote_where_the_format_has_a_place_for_them() -> None:
    written = stored()
    for path in CHECKPOINTS["r2r"]:
        assert load("r2r", path).threshold == written["r2r"]["threshold"]
    assert load("citer", FOLDER / "citer").threshold is None
    assert load("co_llm", FOLDER / "collm_small").threshold == written["collm"]["threshold"]


def test_the_demo_deferral_token_is_the_last_row_by_config_and_by_tokenizer(tmp_path: Path) -> None:
    head = load("co_llm", FOLDER / "collm_small")
    assert isinstance(head, CoLLMHead)
    assert head.excluded == (head.defer_id,) == (100,)
    config = json.loads((FOLDER / "collm_small/config.json").read_text())
    del config["defer_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "collm_small/tokenizer.json").read_bytes())
    by_tokenizer = load("co_llm", tmp_path)
    assert by_tokenizer == head
