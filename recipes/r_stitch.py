"""R-Stitch (arXiv 2507.17307) with decorated functions; r_stitch.yaml says the same."""

import torch

from tokenflow import Recipe

recipe = Recipe(
    "r-stitch",
    entry="slm",
    params={"tau": 0.03},  # normalised entropy in [0, 1], the value of the TokenRouter paper
    batching={"policy": "auto"},
)
slm = recipe.model("slm", "Qwen/Qwen3-0.6B")
llm = recipe.model("llm", "Qwen/Qwen3-32B", engine="sglang", tensor_parallel=2)


@slm.route
def uncertain(result, tau):
    return torch.where(result.entropy() > tau, llm.index, 0)


@slm.send
def without_last(req):
    return req.drop_last()  # the large model rewrites the uncertain token


@llm.route
def certain_again(result, tau):
    return torch.where(result.entropy() <= tau, slm.index, 0)  # by default the token is kept and sent
