"""Recipes that replay recorded routes: a request goes where its trace says, whatever the models write.

The file that ``TOKENFLOW_BENCH_WORK`` names holds the requests (:mod:`bench.compare.work`); the parameter
``request`` of each says which one it is.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import torch

from bench.compare import traces, work
from tokenflow import PeerReq, Recipe
from tokenflow.dsl.messages import RequestView
from tokenflow.routing.python import Result


class Table:
    """For every model, request and output position: where to go next, and whether the token is kept."""

    def __init__(self, requests: list[work.Request]) -> None:
        models = 1 + max(traces.model_of(letter) for request in requests for letter in request.trace)
        lengths = [traces.kept(request.trace) for request in requests]
        self.starts = torch.tensor([0, *lengths]).cumsum(0)
        size = int(self.starts[-1])
        self.next = torch.zeros(models, size, dtype=torch.int64)
        self.keeps = [[True] * size for _ in range(models)]
        for start, request in zip(self.starts.tolist(), requests, strict=False):
            place = start
            for letter, following in pairwise(request.trace + request.trace[-1]):
                model, peer = traces.model_of(letter), traces.model_of(following)
                self.next[model, place] = peer + 1 if peer != model else 0
                self.keeps[model][place] = letter.isupper()
                place += letter.isupper()

    def route(self, model: int, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Destination codes, int64 [B]."""
        return self.next[model, self.starts[request.long()] + position]

    def send(self, model: int, view: RequestView) -> PeerReq:
        """With or without the token just sampled."""
        place = int(self.starts[int(view.params["request"])]) + len(view.tokens) - view.prompt_tokens
        return view.keep() if self.keeps[model][place] else view.drop_last()


table = Table(work.load(Path(os.environ["TOKENFLOW_BENCH_WORK"])))


def route_first(result: Result, request: torch.Tensor) -> torch.Tensor:
    return table.route(0, request, result.position)


def route_second(result: Result, request: torch.Tensor) -> torch.Tensor:
    return table.route(1, request, result.position)


def route_third(result: Result, request: torch.Tensor) -> torch.Tensor:
    return table.route(2, request, result.position)


def send_first(view: RequestView) -> PeerReq:
    return table.send(0, view)


def send_second(view: RequestView) -> PeerReq:
    return table.send(1, view)


def send_third(view: RequestView) -> PeerReq:
    return table.send(2, view)


ROUTES = (route_first, route_second, route_third)
SENDS = (send_first, send_second, send_third)


def replaying(name: str, count: int) -> Recipe:
    """A recipe of ``count`` models, ``m0`` and so on, that starts at the first."""
    recipe = Recipe(name, entry="m0", params={"request": 0.0})
    for index in range(count):
        model = recipe.model(f"m{index}", f"m{index}")
        model.route(ROUTES[index])
        model.send(SENDS[index])
    return recipe


pair = replaying("replay-pair", 2)
trio = replaying("replay-trio", 3)
