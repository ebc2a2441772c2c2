"""Co-LLM (arXiv 2403.03870): a copy of the small model that says, through one more token, when to defer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from recipes.demo.decoder import Decoder, pad
from recipes.demo.positions import Positions, fit
from recipes.demo.tasks import TASKS, draw
from recipes.demo.tokenizer import PIECES, answer_ids, prompt_ids, save_checkpoint

DEFER = "<|defer|>"
DEFER_ID = len(PIECES)
# Mean log-probability that the large model gives its own greedy token.
LARGE_LOGPROB = -0.02

Pair = tuple[list[int], list[int]]
"""Ids of a prompt and of its worked answer."""


def defer_row(data: Positions, embedding: Tensor) -> Tensor:
    """A row [H] of the tied embedding whose logit tells where the small model diverges."""
    row = nn.Parameter(embedding[:DEFER_ID].mean(0).clone())
    balance = torch.tensor(8.0)

    def loss_of(at: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            data.hidden[at] @ row, data.divergent[at], pos_weight=balance
        )

    fit([row], loss_of, data, epochs=4, lr=2e-2)
    return row.detach()


def with_defer_token(checkpoint: Path, row: Tensor) -> Qwen3ForCausalLM:
    """The model with exactly as many embedding rows as ids, as published; the last one is ``row``."""
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    model.resize_token_embeddings(DEFER_ID + 1)
    model.model.embed_tokens.weight.data[DEFER_ID] = row
    model.config.defer_token_id = DEFER_ID
    return model


def tune(model: Qwen3ForCausalLM, rng: Random, *, steps: int, lr: float) -> float:
    """Train the whole model on the mixture loss; gives the last batch's."""
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    last = 0.0
    for part in batches(rng, steps):
        ids = pad([prompt + answer for prompt, answer in part])
        answered = torch.zeros_like(ids, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(part):
            answered[row, len(prompt) : len(prompt) + len(answer)] = True
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1][answered[:, 1:]]
        loss = mixture_loss(logits, ids[:, 1:][answered[:, 1:]])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        last = loss.item()
    return last


def batches(rng: Random, steps: int) -> Iterator[list[Pair]]:
    """At least ``steps`` batches of 12 pairs of like length; no question twice, so nothing is memorised."""
    done = 0
    while done < steps:
        pool = unseen(rng, 240)
        for group in torch.randperm(20).tolist():
            yield pool[12 * group : 12 * group + 12]
            done += 1


def unseen(rng: Random, count: int) -> list[Pair]:
    """Training questions with their reference answers, which the large model nearly always gives too."""
    asked = (draw(rng, rng.choice(TASKS)) for _ in range(count))
    pairs = [(prompt_ids(problem.question), answer_ids(problem.answer)) for problem in asked]
    return sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))


def mixture_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of the negative mixture log-likelihood (arXiv 2403.03870, section 2) and a cross-entropy.

    The sigmoid of the defer logit weighs the small model's likelihood of the target against the large one's;
    the cross-entropy ties it to where the small model is wrong.

    :param logits: [n, V], the defer token's the last.
    :param targets: [n].
    """
    defer_logit, token_logits = logits[:, DEFER_ID], logits[:, :DEFER_ID]
    own = token_logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    stay, leave = F.logsigmoid(-defer_logit) + own, F.logsigmoid(defer_logit) + LARGE_LOGPROB
    mixture = -torch.logsumexp(torch.stack([stay, leave]), 0).mean()
    wrong = (token_logits.argmax(-1) != targets).float()
    gate = F.binary_cross_entropy_with_logits(defer_logit, wrong, pos_weight=torch.tensor(5.0))
    return (mixture + gate) / 2


def save(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write the model in bfloat16; it stays so."""
    stored = model.eval().bfloat16()
    stored.config.dtype = torch.bfloat16
    save_checkpoint(stored, directory, special_tokens=(DEFER,))


def defer_scores(tuned: Decoder, pairs: list[Pair]) -> tuple[Tensor, Tensor]:
    """Defer probabilities [n] over the answers, and 1 where the model's own token differs [n]."""
    scores, divergent = [], []
    for prompt, answer in pairs:
        ids = torch.tensor([prompt + answer])
        tuned.open(*ids.shape)
        logits = tuned.forward(ids, torch.arange(ids.shape[1])[None]).logits[0, len(prompt) - 1 : -1]
        scores.append(logits[:, DEFER_ID].sigmoid())
        divergent.append((logits[:, :DEFER_ID].argmax(-1) != torch.tensor(answer)).float())
    return torch.cat(scores), torch.cat(divergent)
