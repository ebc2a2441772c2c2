"""The settings that are recorded: which algorithm over which demo models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from recipes.demo.heads import load_citer, load_r2r
from tests.reference import rules
from tests.reference.reference import ReferenceModels, Rule, Trace

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
PAIR: Mapping[str, str] = {"slm": "small", "llm": "large"}
COLLM_PAIR: Mapping[str, str] = {"slm": "heads/collm_small", "llm": "large"}
TRIO: Mapping[str, str] = {"slm": "small", "mid": "mid", "llm": "large"}
TAUS = (-1.0, 0.01, 0.03, 0.1, 1.0)


@dataclass(frozen=True)
class Case:
    """One setting.  ``models`` are folders of the demo by member, in the order of the recipe."""

    rule: Rule
    models: Mapping[str, str] = field(default_factory=lambda: PAIR)
    temperature: float = 0.0

    def trace(self, models: ReferenceModels, prompt: Sequence[int], seed: int, max_tokens: int) -> Trace:
        """The answer to one prompt; ``models`` are this setting's."""
        return models.run(self.rule, prompt, max_tokens, seed=seed, temperature=self.temperature)


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: the small model drafts, the large one checks."""

    draft: int
    models: Mapping[str, str] = field(default_factory=lambda: PAIR)

    def trace(self, models: ReferenceModels, prompt: Sequence[int], seed: int, max_tokens: int) -> Trace:
        """The answer to one prompt."""
        return models.speculate(prompt, max_tokens, self.draft, "slm", "llm")


def r_stitch(tau: float) -> str:
    """Name of the setting of R-Stitch with this threshold."""
    return f"r_stitch tau={tau}"


@cache
def r_stitch_cases() -> Mapping[str, Case]:
    """R-Stitch from the large model alone to the small model alone."""
    return {r_stitch(tau): Case(rules.RStitch(tau)) for tau in TAUS}


@cache
def algorithm_cases() -> Mapping[str, Case | Speculation]:
    """Every algorithm of the demo's recipes, and what their parameters change."""
    r2r, citer = _r2r(), _citer()
    confident = rules.Below(rules.confidence, 0.97)
    close = rules.Below(rules.margin, 0.95)
    uncertain = rules.Reaching(rules.entropy_nats, 0.15)
    weights = {"slm": 0.5, "mid": 0.3, "llm": 0.2}
    stitch = rules.RStitch(0.03)
    return {
        "r2r": Case(rules.Deferral(rules.R2R(r2r, 0.02447))),
        "citer": Case(rules.Deferral(rules.Citer(citer, 0.99586))),
        "co_llm": Case(rules.Deferral(rules.CoLLM(100, 0.04519)), COLLM_PAIR),
        "me": Case(rules.Ensemble(weights), TRIO),
        "me sampled": Case(rules.Ensemble(weights), TRIO, temperature=1.0),
        "max_prob": Case(rules.Deferral(confident)),
        "max_prob n=4": Case(rules.Deferral(confident, 4)),
        "margin": Case(rules.Deferral(close)),
        "margin n=3": Case(rules.Deferral(close, 3)),
        "entropy": Case(rules.Deferral(uncertain)),
        "entropy n=2": Case(rules.Deferral(uncertain, 2)),
        "random": Case(rules.Deferral(rules.Chance(0.2))),
        "think_answer": Case(rules.ThinkAnswer(ids("Answer: "))),
        "step_boundary": Case(rules.StepBoundary(0.1, ids(" "), ids("Answer: "), 24)),
        "tag_call": Case(rules.Budgeted(rules.TagCall(ids("="), 2), tokens=30)),
        "speculative": Speculation(4),
        "cascade": Case(rules.Cascade(0.03, 0.1), TRIO),
        "turns": Case(rules.Turns({"slm": 3, "mid": 2, "llm": 1}), TRIO),
        "momentum": Case(rules.Deferral(rules.Momentum(0.15, 0.35, 0.75))),
        "rolling": Case(rules.Deferral(rules.Rolling(0.15))),
        "neural_rolling": Case(rules.Deferral(rules.R2R(r2r, 0.02447, latest=3))),
        "immediate": Case(rules.Deferral(rules.Reaching(rules.aleatoric, IMMEDIATE))),
        "budget": Case(rules.Budgeted(stitch, share=0.1, tokens=12)),
        "budget of tokens": Case(rules.Budgeted(stitch, tokens=5)),
    }


IMMEDIATE = 2.15
"""Aleatoric uncertainty from which a tenth of the small demo model's tokens are."""


@cache
def ids(text: str) -> tuple[int, ...]:
    """The token ids of a text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO / "small")
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@cache
def _r2r() -> Any:
    embedding: torch.Tensor = load_file(DEMO / "small" / "model.safetensors")["model.embed_tokens.weight"]
    return load_r2r(DEMO / "heads" / "r2r" / "default_router.pt", embedding.float())


@cache
def _citer() -> Any:
    return load_citer(DEMO / "heads" / "citer" / "citer_mlp.pth")
