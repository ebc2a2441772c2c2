"""The demo's recipes with router classes: each says what the YAML file of its name says."""

import math

import torch

from tokenflow import BaseRouter, PeerReq, Recipe

DEMO = "../../recipes/demo"
SLM, MID, LLM = 1, 2, 3
"""Codes in a recipe of three models."""
STEPS = [
    {"when": 'momentum(at("Answer: "), 0.999) == 0', "at": " ", "to": "slm", "send": "keep"},
    {"when": 'momentum(at("Answer: "), 0.999) == 0', "after": 24, "to": "slm", "send": "keep"},
]


def pair(name, slm, llm, *, small="small", verify=False, **data):
    """A recipe over two demo models, each with its class (or rules, or nothing)."""
    recipe = Recipe(name, **{"entry": "slm", **data})
    heads = list(data.get("heads", ()))
    add(recipe, "slm", small, slm, "llm", heads=heads)
    add(recipe, "llm", "large", llm, "slm", verify=verify)
    return recipe


def trio(name, slm, mid, llm, **data):
    """A recipe over three demo models."""
    recipe = Recipe(name, **data)
    for model, folder, router in (("slm", "small", slm), ("mid", "mid", mid), ("llm", "large", llm)):
        add(recipe, model, folder, router)
    return recipe


def add(recipe, name, folder, router, peer=None, **config):
    classed = isinstance(router, type)
    given = {"router": router, "peer": peer} if classed else {}
    model = recipe.model(name, f"{DEMO}/{folder}", dtype="float32", **given, **config)
    if router is not None and not classed:
        model.rules(router)


class Dropping(BaseRouter):
    """The peer writes the position of the sampled token; the message is put together by hand."""

    def send(self, req):
        token_ids = req.origin_input_ids + req.output_ids[:-1]
        anchor = req.peer_locs[self.peer_idx] or 0
        return PeerReq(rid=req.rid, token_ids=token_ids[anchor:], loc=len(token_ids), finished=req.finished())


class Back(BaseRouter):
    """To the peer after every token."""

    def route(self, result):
        return [self.peer_idx] * len(result.next_token_ids)


class BackAfterN(BaseRouter):
    def route(self, result):
        return torch.where(result.run_length >= self.n, self.peer_idx, 0)


class Uncertain(Dropping):
    def route(self, result):
        probs = result.logits_output.next_token_logits.softmax(dim=-1)
        entropy = -(probs * probs.log()).sum(-1) / math.log(probs.shape[-1])
        return torch.where(entropy > self.tau, self.peer_idx, 0)


class Certain(BaseRouter):
    def route(self, result):
        return torch.where(result.entropy() <= self.tau, self.peer_idx, 0)


class Divergent(Dropping):
    def route(self, result):
        scores = result.head("divergence")
        return torch.where(scores >= result.threshold("divergence"), self.peer_idx, 0)


class Doubted(Dropping):
    def route(self, result):
        return torch.where(result.head("confidence") < self.tau, self.peer_idx, 0)


class Deferred(Dropping):
    def route(self, result):
        return torch.where(result.head("defer") > self.eta, self.peer_idx, 0)


class Drawn(BaseRouter):
    """Every model draws the same number, so all share one class."""

    def route(self, result):
        return [SLM if number < 0.5 else MID if number < 0.8 else LLM for number in result.draw.tolist()]


class Unlikely(Dropping):
    def route(self, result):
        best = result.logits_output.next_token_logits.softmax(-1).amax(-1)
        return torch.where(best < self.t, self.peer_idx, 0)


class Close(Dropping):
    def route(self, result):
        return torch.where(result.margin() < self.t, self.peer_idx, 0)


class UncertainInNats(Dropping):
    def route(self, result):
        return torch.where(result.entropy_nats() >= self.h, self.peer_idx, 0)


class ByChance(Dropping):
    def route(self, result):
        return torch.where(result.draw < self.q, self.peer_idx, 0)


def ends_in_answer(result):
    """Whether the output with the sampled token ends in "Answer: "."""
    answer = torch.tensor([38, 83, 88, 92, 74, 87, 31, 5])
    written = torch.cat((result.tails[:, -7:], result.next_token_ids[:, None]), 1)
    return (written == answer).all(1)


class AnswerBegun(BaseRouter):
    def route(self, result):
        return torch.where(ends_in_answer(result), self.peer_idx, 0)


class UncertainStep(Dropping):
    SPACE = 5

    def route(self, result):
        last = result.tails[:, -1]
        at_start = (last < 0) | (last == self.SPACE)
        wanted = (at_start & (result.entropy_nats() >= self.h)) | ends_in_answer(result)
        return torch.where(wanted, self.peer_idx, 0)


class Called(BaseRouter):
    EQUALS = 34

    def route(self, result):
        return torch.where(result.next_token_ids == self.EQUALS, self.peer_idx, 0)


class Drafted(BaseRouter):
    def route(self, result):
        return torch.where(result.run_length >= 4, self.peer_idx, 0)


class ByEntropy(BaseRouter):
    """The more uncertain a token, the larger its writer, which writes it anew."""

    def route(self, result):
        entropy = result.entropy()
        return torch.where(entropy > self.high, LLM, torch.where(entropy > self.low, MID, SLM))

    def send(self, req):
        return req.drop_last() if req.peer > self.index else req.keep()


r_stitch = pair("r-stitch", Uncertain, Certain, params={"tau": 0.03})
r2r = pair(
    "r2r",
    Divergent,
    Back,
    heads={"divergence": {"kind": "r2r", "path": f"{DEMO}/heads/r2r/default_router.pt"}},
)
citer = pair(
    "citer",
    Doubted,
    Back,
    params={"tau": 0.99586},
    heads={"confidence": {"kind": "citer", "path": f"{DEMO}/heads/citer/citer_mlp.pth"}},
)
co_llm = pair(
    "co-llm",
    Deferred,
    Back,
    small="heads/collm_small",
    params={"eta": 0.04519},
    heads={"defer": {"kind": "co_llm"}},
)
me = trio("me", Drawn, Drawn, Drawn, draw={"slm": 0.5, "mid": 0.3, "llm": 0.2})
max_prob = pair("max-prob", Unlikely, BackAfterN, params={"t": 0.97, "n": 1})
margin = pair("margin", Close, BackAfterN, params={"t": 0.95, "n": 1})
entropy = pair("entropy", UncertainInNats, BackAfterN, params={"h": 0.15, "n": 1})
random = pair("random", ByChance, Back, params={"q": 0.2})
think_answer = pair("think-answer", None, AnswerBegun, entry="llm")
# A route sees one step: what is remembered over steps is left to rules.
step_boundary = pair("step-boundary", UncertainStep, STEPS, params={"h": 0.1})
tag_call = pair("tag-call", Called, BackAfterN, params={"n": 2}, budgets={"llm": {"max_tokens": 30}})
speculative = pair("speculative", Drafted, Back, verify=True, rollback=4)
cascade = trio("cascade", ByEntropy, ByEntropy, ByEntropy, entry="slm", params={"low": 0.03, "high": 0.1})
