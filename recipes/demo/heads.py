"""Router heads of R2R, CITER and Co-LLM, with the tensor names of published checkpoints: and their rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from recipes.demo.policies import Rule, one_token

TOP_LOGITS = 100


class ResidualBlock(nn.Module):
    """A pre-norm feed-forward block."""

    def __init__(self, width: int, expansion: int, dropout: float) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, width * expansion),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(width * expansion, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.layer_norm(x))


class Backbone(nn.Module):
    """Residual blocks of one width, then a single logit."""

    def __init__(self, widths: Sequence[int], expansion: int, dropout: float) -> None:
        super().__init__()
        if len(set(widths)) != 1:
            raise ValueError(f"hidden_dims must all be equal here, got {list(widths)}")
        self.input_projection = nn.Linear(widths[0], widths[0])
        self.blocks = nn.ModuleList(ResidualBlock(width, expansion, dropout) for width in widths)
        self.output_layer = nn.Sequential(nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.input_projection(x)
        for block in self.blocks:
            x = block(x)
        return self.output_layer(x)[..., 0]


class R2RHead(nn.Module):
    """R2R (arXiv 2505.21600): is the small model's token one that changes the outcome?

    Reads the hidden state [n, H], the sampled token [n] and the largest raw logits [n, 100]; gives a logit
    [n].
    """

    def __init__(
        self, hidden: int, embedding: Tensor, widths: Sequence[int], expansion: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.logits_projection = nn.Linear(TOP_LOGITS, hidden)
        self.combined_projection = nn.Linear(2 * hidden + embedding.shape[1], widths[0])
        self.backbone = Backbone(widths, expansion, dropout)
        self.token_embeddings = nn.Embedding.from_pretrained(embedding.clone(), freeze=True)

    def forward(self, hidden: Tensor, tokens: Tensor, top_logits: Tensor) -> Tensor:
        parts = (hidden, self.token_embeddings(tokens), self.logits_projection(top_logits))
        return self.backbone(self.combined_projection(torch.cat(parts, -1)))


class CiterHead(nn.Module):
    """CITER (arXiv 2502.01976): the probability [n] that the small model's token is good, from [n, H]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 2 * hidden),
            nn.BatchNorm1d(2 * hidden),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(2 * hidden, hidden),
            nn.Dropout(0.1),
        )
        self.linear = nn.Linear(hidden, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(self.mlp(hidden)).sigmoid()[..., 0]


def load_r2r(path: Path, embedding: Tensor) -> R2RHead:
    """Read a head; the small model's ``embedding`` [V, H] stands in where the file leaves it out."""
    saved = torch.load(path, weights_only=True)
    weights, made_with = dict(saved["state_dict"]), saved["init_args"]
    head = R2RHead(
        made_with["hidden_states_size"],
        embedding,
        made_with["hidden_dims"],
        made_with["expansion_factor"],
        made_with["dropout_rate"],
    )
    weights.setdefault("token_embeddings.weight", embedding)
    head.load_state_dict(weights)
    return head.eval()


def load_citer(path: Path) -> CiterHead:
    """Read a head; its width is that of its tensors."""
    weights = torch.load(path, weights_only=True)
    head = CiterHead(weights["linear.weight"].shape[1])
    head.load_state_dict(weights)
    return head.eval()


def top_logits(logits: Tensor) -> Tensor:
    """The largest logits [n, 100] in falling order, as R2R reads them."""
    return logits.topk(TOP_LOGITS, -1).values


def r2r(head: R2RHead, threshold: float) -> Rule:
    """Ask where the token is divergent with at least this probability."""
    return one_token(
        lambda step: (
            head(step.hidden, step.small_tokens, top_logits(step.small_logits)).sigmoid() >= threshold
        )
    )


def citer(head: CiterHead, tau: float) -> Rule:
    """Ask where the confidence is below ``tau``."""
    return one_token(lambda step: head(step.hidden) < tau)


def co_llm(defer_id: int, eta: float) -> Rule:
    """Co-LLM (arXiv 2403.03870): ask where the sigmoid of the defer token's logit exceeds ``eta``."""
    logit = math.log(eta / (1 - eta))
    return one_token(lambda step: step.small_logits[:, defer_id] > logit)
