"""The demo's recipes with router classes: each says what the YAML file of its name says."""

import math

import torch

from tokenflow import BaseRouter, PeerReq, Recipe

DEMO = "../../recipes/demo"
SLM, MID, LLM = 1, 2, 3
"""Codes in a recipe of three models."""


def pair(name, slm, llm, *, small="small", verify=False, signals=None, **data):
    """A recipe over two demo models, each with its class or nothing; ``signals`` are those of each."""
    recipe, signals = Recipe(name, **{"entry": "slm", **data}), signals or {}
    heads = list(data.get("heads", ()))
    add(recipe, "slm", small, slm, "llm", heads=heads, signals=signals.get("slm"))
    add(recipe, "llm", "large", llm, "slm", verify=verify, signals=signals.get("llm"))
    return recipe


def trio(name, slm, mid, llm, **data):
    """A recipe over three demo models."""
    recipe = Recipe(name, **data)
    for model, folder, router in (("slm", "small", slm), ("mid", "mid", mid), ("llm", "large", llm)):
        add(recipe, model, folder, router)
    return recipe


def add(recipe, name, folder, router, peer=None, **config):
    given = {} if router is None else {"router": router, "peer": peer}
    recipe.model(name, f"{DEMO}/{folder}", dtype="float32", **given, **config)


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


class StepOver(BaseRouter):
    def route(self, result):
        over = result.signal("at_end") | (result.run_length >= 24)
        return torch.where(over & result.signal("before_answer"), self.peer_idx, 0)


class TooFewCertain(Dropping):
    def route(self, result):
        certain = result.signal("certain")
        wanted = (certain <= self.low) | (result.signal("asked_before") & (certain <= self.high))
        return torch.where(wanted, self.peer_idx, 0)


class UncertainOfLate(Dropping):
    def route(self, result):
        now = torch.where(result.signal("asked_before"), result.signal("mean"), result.entropy_nats())
        return torch.where(now >= self.h, self.peer_idx, 0)


class DivergentOfLate(Dropping):
    def route(self, result):
        return torch.where(result.signal("divergent"), self.peer_idx, 0)


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
step_boundary = pair(
    "step-boundary",
    UncertainStep,
    StepOver,
    params={"h": 0.1},
    signals={"llm": {"before_answer": 'momentum(at("Answer: "), 0.999) == 0', "at_end": 'at(" ")'}},
)
tag_call = pair("tag-call", Called, BackAfterN, params={"n": 2}, budgets={"llm": {"max_tokens": 30}})
speculative = pair("speculative", Drafted, Back, verify=True, rollback=4)
cascade = trio("cascade", ByEntropy, ByEntropy, ByEntropy, entry="slm", params={"low": 0.03, "high": 0.1})
ASKED = "run_length == 1 and position > 0"
"""Whether the large model wrote the token before."""
momentum = pair(
    "momentum",
    TooFewCertain,
    Back,
    params={"h": 0.15, "low": 0.35, "high": 0.75},
    signals={"slm": {"certain": "momentum(entropy_nats < h, 0.7)", "asked_before": ASKED}},
)
rolling = pair(
    "rolling",
    UncertainOfLate,
    Back,
    params={"h": 0.15},
    signals={"slm": {"mean": "window(entropy_nats, 3)", "asked_before": ASKED}},
)
neural_rolling = pair(
    "neural-rolling",
    DivergentOfLate,
    Back,
    heads={"divergence": {"kind": "r2r", "path": f"{DEMO}/heads/r2r/default_router.pt"}},
    signals={"slm": {"divergent": 'window(head("divergence"), 3) >= threshold("divergence")'}},
)
