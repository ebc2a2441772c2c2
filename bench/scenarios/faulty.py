"""The demo's R-Stitch with a route in Python that raises where a request's ``fault`` says so."""

import torch

from tokenflow import Recipe

recipe = Recipe("r-stitch-faulty", entry="slm", params={"tau": 0.03, "fault": 0})
slm = recipe.model("slm", "../../recipes/demo/small", dtype="float32")
llm = recipe.model("llm", "../../recipes/demo/large", dtype="float32")


@slm.route
def uncertain(result, tau, fault):
    if bool((fault > 0).any()):
        raise ValueError("as it was asked to")
    return torch.where(result.entropy() > tau, llm.index, 0)


@slm.send
def without_last(req):
    return req.drop_last()


llm.rules([{"when": "entropy <= tau", "to": "slm", "send": "keep"}])
