"""R-Stitch (arXiv 2507.17307) with the classes of the TokenRouter paper; r_stitch.yaml says the same."""

import math

import torch

from tokenflow import BaseRouter, PeerReq, Recipe


class RStitchSLM(BaseRouter):
    """As the paper lists it: objects have the parameter ``tau``, and ``peer_idx`` for the large model."""

    def route(self, result):
        probs = result.logits_output.next_token_logits.softmax(dim=-1)
        entropy = -(probs * probs.log()).sum(-1) / math.log(probs.shape[-1])
        destination = torch.zeros_like(entropy, dtype=torch.long)
        destination[entropy > self.tau] = self.peer_idx
        return destination.cpu()

    def send(self, req) -> PeerReq:
        # Without the uncertain token, which the large model writes anew.
        token_ids = req.origin_input_ids + req.output_ids[:-1]
        peer_anchor = req.peer_locs[self.peer_idx] or 0
        return PeerReq(
            rid=req.rid, token_ids=token_ids[peer_anchor:], loc=len(token_ids), finished=req.finished()
        )


class RStitchLLM(RStitchSLM):
    """Hands back where it is certain again, and keeps the token that says so."""

    def route(self, result):
        return torch.where(result.entropy() <= self.tau, self.peer_idx, 0)

    def send(self, req) -> PeerReq:
        return req.keep()


recipe = Recipe(
    "r-stitch",
    entry="slm",
    params={"tau": 0.03},  # normalised entropy in [0, 1], the value of the TokenRouter paper
    batching={"policy": "auto"},
)
recipe.model("slm", "Qwen/Qwen3-0.6B", router=RStitchSLM, peer="llm")
recipe.model("llm", "Qwen/Qwen3-32B", engine="sglang", tensor_parallel=2, router=RStitchLLM, peer="slm")
