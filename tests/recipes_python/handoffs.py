"""Recipes whose Python hands over in ways that the demo's do not, right and wrong ones."""

import math
import time

import torch

from tokenflow import BaseRouter, PeerReq, Recipe

SMALL = "../../recipes/demo/small"
SLM, LLM = 1, 2


class RStitchSLM(BaseRouter):
    def route(self, result):
        probs = result.logits_output.next_token_logits.softmax(dim=-1)
        entropy = -(probs * probs.log()).sum(-1) / math.log(probs.shape[-1])
        return torch.where(entropy > self.tau, self.peer_idx, 0)

    def send(self, req):
        token_ids = req.origin_input_ids + req.output_ids[:-1]
        anchor = req.peer_locs[self.peer_idx] or 0
        return PeerReq(rid=req.rid, token_ids=token_ids[anchor:], loc=len(token_ids), finished=req.finished())


class DropsToo(RStitchSLM):
    """Only the comparison is turned round: what it inherits drops the token that it should keep."""

    def route(self, result):
        return torch.where(result.entropy() <= self.tau, self.peer_idx, 0)


livelock = Recipe("bouncing", entry="slm", params={"tau": 0.4})
livelock.model("slm", SMALL, router=RStitchSLM, peer="llm")
livelock.model("llm", SMALL, router=DropsToo, peer="slm")

FROM = 3
"""Output position from which a request whose parameter says so is misrouted."""

faulty = Recipe("faulty", entry="slm", params={"fault": 0})
slm = faulty.model("slm", SMALL)
faulty.model("llm", SMALL)


@slm.route
def misroute(result, fault):
    rows, kind = len(fault), int(fault.max())
    if int(result.position.max()) < FROM:
        return [0] * rows
    if kind == 1:
        raise ValueError("no idea")
    if kind == 9:
        raise SystemExit(3)
    return [
        [0] * rows,
        ...,
        None,
        [0] * (rows + 1),
        torch.zeros(rows),
        [7] * rows,
        torch.full((rows,), -1),
        torch.zeros(rows, 2, dtype=torch.int64),
        [LLM / 2] * rows,
    ][kind]


forgetful = Recipe("forgetful", entry="slm", rollback=4, params={"run": 5, "back": 2})
slm = forgetful.model("slm", SMALL)
llm = forgetful.model("llm", SMALL)


@slm.route
def after_run(result, run):
    return torch.where(result.run_length >= run, LLM, 0)


@llm.route
def after_one(result):
    return [SLM] * len(result.next_token_ids)


@llm.receive
def take_back(peer_req, req):
    loc = max(peer_req.loc - int(req.params["back"]), len(req.origin_input_ids))
    return PeerReq(peer_req.rid, peer_req.token_ids[: max(loc - peer_req.base, 0)], loc)


pointless = Recipe("pointless", entry="slm", rollback=4)
slm = pointless.model("slm", SMALL)
llm = pointless.model("llm", SMALL)


@slm.route
def after_four(result):
    return torch.where(result.run_length >= 4, LLM, 0)


@llm.route
def always(result):
    return [SLM] * len(result.next_token_ids)


@llm.send
def drop(req):
    return req.drop_last()


@llm.receive
def take_all_back(peer_req, req):
    return PeerReq(peer_req.rid, [], peer_req.loc - 4)


remembering = Recipe("remembering", entry="slm", params={"tau": 0.42})
slm = remembering.model(
    "slm",
    SMALL,
    signals={"late": "window(entropy, 3)", "smooth": "momentum(token % 3 == 0, 0.6)", "digit": 'at("7")'},
)
llm = remembering.model("llm", SMALL, signals={"late": "window(entropy > tau, 4)"})


@slm.route
def uncertain_of_late(result, late, smooth, digit, tau):
    return torch.where((late > tau) & (smooth < 0.5) | digit, LLM, 0)


@slm.send
def without_last(req):
    return req.drop_last()


@llm.route
def certain_of_late(result):
    return torch.where(result.signal("late") < 0.6, SLM, 0)


failing = Recipe("failing", entry="slm", params={"fault": 0})
slm = failing.model("slm", SMALL, step_timeout=1.5)
llm = failing.model("llm", SMALL)


@slm.route
def away_at_three(result):
    return torch.where(result.position == FROM, LLM, 0)


@slm.send
def fault_of_send(req):
    if req.params["fault"] == 7:
        time.sleep(600)
    while req.params["fault"] == 8:
        pass
    fail(req, 1)
    return req.keep()


@llm.receive
def fault_of_receive(peer_req, req):
    fail(req, 4)


def fail(req, first):
    kinds = {0: KeyboardInterrupt, 1: SystemExit, 2: GeneratorExit}
    if (kind := kinds.get(req.params["fault"] - first)) is not None:
        raise kind("by the recipe")


learned = Recipe("learned", entry="slm")
slm = learned.model("slm", SMALL)
learned.model("llm", SMALL)
LAYER = torch.nn.Linear(1, 1)


@slm.route
def by_a_layer(result):
    score = LAYER(result.entropy()[:, None])[:, 0]
    assert not score.requires_grad
    return [0] * len(score)
