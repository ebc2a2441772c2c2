"""Training data of the router heads: the small model reads along while the large one answers.

A position is *divergent* where the small model's own choice differs from the large model's token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recipes.demo.decoder import Decoder, pad
from recipes.demo.policies import simulate, small_only
from recipes.demo.tasks import problems
from recipes.demo.tokenizer import prompt_ids


@dataclass(frozen=True, slots=True)
class Positions:
    """The small model at every answer position of the training data.

    :param hidden: its hidden states, float32 [n, H].
    :param logits: its logits, float32 [n, V].
    :param choices: its most probable tokens, int64 [n].
    :param divergent: 1 where the large model wrote another token, float32 [n].
    :param training: indices to train on; the others, ``validation``, only measure.
    """

    hidden: Tensor
    logits: Tensor
    choices: Tensor
    divergent: Tensor
    training: Tensor
    validation: Tensor


def collect(small: Decoder, large: Decoder, per_task: int) -> Positions:
    """Let the large model answer training questions and the small one read along."""
    asked = problems(per_task, 30, held_out=False)
    answers = [response.ids for response in simulate(asked, small_only, large)]
    read = [(prompt_ids(problem.question), ids) for problem, ids in zip(asked, answers, strict=True)]
    hidden, logits = [], []
    for start in range(0, len(read), 50):
        part = read[start : start + 50]
        ids = pad([prompt + answer for prompt, answer in part])
        small.open(*ids.shape)
        features = small.forward(ids, torch.arange(ids.shape[1]).expand_as(ids))
        for row, (prompt, answer) in enumerate(part):
            span = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
            hidden.append(features.hidden[row, span])
            logits.append(features.logits[row, span])
    targets = torch.tensor([token for ids in answers for token in ids])
    every_logit = torch.cat(logits)
    choices = every_logit.argmax(-1)
    validation = torch.rand(len(targets)) < 0.1
    return Positions(
        hidden=torch.cat(hidden),
        logits=every_logit,
        choices=choices,
        divergent=(choices != targets).float(),
        training=(~validation).nonzero()[:, 0],
        validation=validation.nonzero()[:, 0],
    )


def fit(
    parameters: list[nn.Parameter],
    loss_of: Callable[[Tensor], Tensor],
    data: Positions,
    *,
    epochs: int,
    lr: float,
    weight_decay: float = 0.0,
    module: nn.Module | None = None,
    batch: int = 1024,
) -> float:
    """AdamW with a cosine schedule; ``loss_of`` maps indices to a loss.  Gives the validation loss."""
    optimiser = torch.optim.AdamW(parameters, lr, weight_decay=weight_decay)
    steps = epochs * (len(data.training) // batch + 1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    if module is not None:
        module.train()
    for _ in range(epochs):
        for indices in data.training[torch.randperm(len(data.training))].split(batch):
            _update(optimiser, schedule, loss_of(indices))
    if module is not None:
        module.eval()
    with torch.no_grad():
        return float(loss_of(data.validation))


def _update(
    optimiser: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, loss: Tensor
) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    schedule.step()
