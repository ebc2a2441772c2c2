"""Recipes whose models send fields of their own, where the runtime itself hands requests over as well.

What ``send`` and ``receive`` saw of each request is noted by its parameter ``key``.
"""

import torch

from tokenflow import PeerReq, Recipe

SMALL = "../../recipes/demo/small"
SLM, LLM, MID = 1, 2, 3
SEEN = {}


def note(req, *what):
    SEEN.setdefault(req.params["key"], []).append(what)


def tell(req, code):
    """The last token is always dropped, by a message that is put together by hand."""
    note(req, "send", code, req.peer, len(req), req.sampled)
    written = [*req.origin_input_ids, *req.output_ids]
    anchor = req.peer_locs[req.peer] or 0
    return PeerReq(req.rid, written[anchor:-1], len(written) - 1, said=len(written))


def hear(peer_req, req, code):
    note(req, "receive", code, req.peer, peer_req.said, peer_req.loc, peer_req.base, len(peer_req.token_ids))


spent = Recipe("spent", entry="slm", budgets={"llm": {"max_tokens": 6}}, params={"key": 0})
slm = spent.model("slm", SMALL)
llm = spent.model("llm", SMALL)


@slm.route
def after_three(result):
    return torch.where(result.run_length >= 3, LLM, 0)


@llm.route
def after_four(result):
    return torch.where(result.run_length >= 4, SLM, 0)


@llm.send
def tell_small(req):
    return tell(req, LLM)


@slm.receive
def small_hears(peer_req, req):
    hear(peer_req, req, SLM)


checked = Recipe("checked", entry="slm", rollback=4, params={"key": 0, "away": 9})
slm = checked.model("slm", SMALL)
llm = checked.model("llm", SMALL, verify=True)
mid = checked.model("mid", SMALL)


@slm.route
def away(result, away):
    return torch.where(result.run_length >= away, MID, 0)


@slm.send
def tell_kept(req):
    message = tell(req, SLM)
    return req.keep(said=message.said)


@llm.receive
def large_hears(peer_req, req):
    hear(peer_req, req, LLM)


llm.rules([{"after": 1, "to": "slm", "send": "keep"}])
mid.rules([{"after": 1, "to": "slm", "send": "keep"}])


meddling = Recipe("meddling", entry="slm", params={"way": 0})
slm = meddling.model("slm", SMALL)
llm = meddling.model("llm", SMALL)
WAYS = (
    lambda req: None,
    lambda req: req.tokens.append(5),
    lambda req: req.tokens.clear(),
    lambda req: req.tokens.pop(),
    lambda req: req.tokens.__setitem__(0, 5),
    lambda req: req.peer_locs.__setitem__(2, 0),
    lambda req: req.params.clear(),
    lambda req: req.tokens[:].clear(),
)


@slm.route
def after_two(result):
    return torch.where(result.run_length >= 2, LLM, 0)


@slm.send
def meddle(req):
    WAYS[int(req.params["way"])](req)
    return PeerReq(req.rid, req.tokens, len(req.tokens), tokens=req.tokens)


@llm.receive
def same_as_sent(peer_req, req):
    assert list(peer_req.token_ids) == list(req.tokens)
    peer_req.token_ids.append(9)


llm.rules([{"after": 1, "to": "slm", "send": "keep"}])
