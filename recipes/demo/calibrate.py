"""How good a router head's score is, and the threshold that it needs to reach an accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.demo.decoder import Decoder
from recipes.demo.policies import Rule, simulate
from recipes.demo.scores import score
from recipes.demo.tasks import Problem

# Shares of tokens that a candidate threshold would send to the large model, cheap to dear.
CANDIDATE_SHARES = (0.05, 0.075, 0.1, 0.13, 0.17, 0.22, 0.3, 0.4)


@dataclass(frozen=True, slots=True)
class Trial:
    """A threshold with the accuracy and LLM share that it gave."""

    threshold: float
    acc: float
    share: float


@dataclass(frozen=True, slots=True)
class Goal:
    """Questions to try thresholds on, and the accuracy to reach on them."""

    problems: Sequence[Problem]
    accuracy: float


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """Probability that a positive outranks a negative, from the rank sum; scores [n], labels 0 or 1 [n]."""
    ranks = scores.argsort().argsort().float() + 1
    positives = labels.sum()
    above = ranks[labels == 1].sum() - positives * (positives + 1) / 2
    return float(above / (positives * (len(labels) - positives)))


def candidates(scores: Tensor) -> list[float]:
    """Thresholds that the candidate shares of the scores [n] exceed."""
    return [round(float(torch.quantile(scores, 1 - share)), 5) for share in CANDIDATE_SHARES]


def choose(
    rule: Callable[[float], Rule], thresholds: Sequence[float], small: Decoder, large: Decoder, goal: Goal
) -> list[Trial]:
    """Bisect ``thresholds``, cheap to dear, for the cheapest that reaches the goal, else the dearest.

    Gives every trial, the chosen one last.
    """
    trials: dict[float, Trial] = {}

    def attempt(threshold: float) -> Trial:
        if threshold not in trials:
            responses = simulate(goal.problems, rule(threshold), small, large)
            pairs = zip(responses, goal.problems, strict=True)
            result = score([response.outcome(problem) for response, problem in pairs])
            trials[threshold] = Trial(threshold, round(result.accuracy, 4), round(result.share, 4))
            print(f"  {trials[threshold]}", flush=True)
        return trials[threshold]

    low, high = 0, len(thresholds) - 1
    while low < high:
        middle = (low + high) // 2
        if attempt(thresholds[middle]).acc >= goal.accuracy:
            high = middle
        else:
            low = middle + 1
    chosen = attempt(thresholds[high])
    return [*(trial for trial in trials.values() if trial is not chosen), chosen]
