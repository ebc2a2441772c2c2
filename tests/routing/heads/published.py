"""The published networks as modules, written for clarity alone, and checkpoints of them as published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

VOCAB = 150

Net = TypeVar("Net", bound=nn.Module)


class R2RBlock(nn.Module):
    """Pre-norm feed-forward with a skip connection."""

    def __init__(self, width: int, out: int, expansion: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, width * expansion),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(width * expansion, out),
            nn.Dropout(0.1),
        )
        self.dim_change = nn.Linear(width, out) if width != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.dim_change(x) + self.mlp(self.layer_norm(x))
        return changed


class R2RBackbone(nn.Module):
    """Blocks from each width to the next, the last one keeping its own."""

    def __init__(self, widths: Sequence[int], expansion: int, classes: int) -> None:
        super().__init__()
        self.input_projection = nn.Linear(widths[0], widths[0])
        self.blocks = nn.ModuleList(
            R2RBlock(width, out, expansion)
            for width, out in zip(widths, [*widths[1:], widths[-1]], strict=True)
        )
        self.output_layer = nn.Sequential(nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.input_projection(x)
        for block in self.blocks:
            x = block(x)
        logit: Tensor = self.output_layer(x)
        return logit


class R2RNet(nn.Module):
    """R2R's router over the hidden state, the sampled token and the largest logits."""

    def __init__(
        self,
        hidden: int,
        widths: Sequence[int],
        *,
        vocab: int = VOCAB,
        embedding: int | None = None,
        top: int = 100,
        expansion: int = 4,
        normalize: bool = False,
        classes: int = 1,
    ) -> None:
        super().__init__()
        width = hidden if embedding is None else embedding
        self.top = top
        self.normalize = normalize
        if normalize:
            self.layer_norm_hidden_states = nn.LayerNorm(hidden)
            self.layer_norm_token = nn.LayerNorm(width)
        self.token_embeddings = nn.Embedding(vocab, width)
        self.logits_projection = nn.Linear(top, hidden)
        self.combined_projection = nn.Linear(2 * hidden + width, widths[0])
        self.backbone = R2RBackbone(widths, expansion, classes)

    def forward(self, hidden: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
        """Divergence probabilities [B]."""
        largest = logits.sort(-1, descending=True).values[:, : self.top]
        embedded = self.token_embeddings(tokens)
        if self.normalize:
            hidden = self.layer_norm_hidden_states(hidden)
            embedded = self.layer_norm_token(embedded)
            largest = largest.softmax(-1)
        joined = torch.cat((hidden, embedded, self.logits_projection(largest)), -1)
        probability: Tensor = self.backbone(self.combined_projection(joined)).sigmoid()[:, 0]
        return probability


class CiterNet(nn.Module):
    """CITER's router over the hidden state, its batch norm kept apart."""

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
        """Probabilities [B] that the token is good."""
        confidence: Tensor = self.linear(self.mlp(hidden)).sigmoid()[:, 0]
        return confidence


def scrambled(net: Net, seed: int = 0) -> Net:
    """The network in evaluation mode, with nothing left at a value that would hide an omission.

    Matrices keep activations near one, so that scores are neither all alike nor all saturated.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if not tensor.is_floating_point():
                tensor.fill_(7)
            elif name.endswith("running_var"):
                tensor.uniform_(0.1, 1.2, generator=generator).pow_(6)
            elif tensor.dim() == 1 and name.endswith("weight"):
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                matrix = tensor.dim() == 2 and "embeddings" not in name
                tensor.normal_(std=tensor.shape[1] ** -0.5 if matrix else 0.3, generator=generator)
    return net.eval()


def r2r_checkpoint(net: R2RNet, *, table: bool = False, threshold: object = 0.25) -> dict[str, Any]:
    """What is published of an R2R router; only the larger of the two files has the embedding table."""
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    if not table:
        del weights["token_embeddings.weight"]
    return {
        "model_type": "HiddenStatesTokenLMHeadLogitsClassifier",
        "init_args": {
            "pretrained_model_name": "some/model",
            # Wrong on purpose: published training configs are, too.
            "hidden_states_size": 2048,
            "hidden_dims": [7, 7],
            "logits_size": 9,
            "expansion_factor": 1,
            "dropout_rate": 0.1,
            "use_position_embedding": False,
            "freeze_lm_head": True,
            "normalize_input": net.normalize,
            "dtype": torch.float32,
        },
        "common_args": {"threshold": threshold, "input_type": ["hidden_states", "token", "logits"]},
        "model_specific_args": {},
        "state_dict": weights,
    }


def saved(path: Path, checkpoint: object) -> Path:
    """Write a checkpoint; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, path)
    return path


def features(rows: int, hidden: int, *, vocab: int = VOCAB, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Random hidden states [B, H], sampled tokens [B] and logits [B, V]."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, hidden, generator=generator),
        torch.randint(0, vocab, (rows,), generator=generator),
        torch.randn(rows, vocab, generator=generator) * torch.rand(rows, 1, generator=generator) * 4,
    )
