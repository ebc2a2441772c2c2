"""Train the router heads of the (small, large) pair and save them in the published formats.

    python -m recipes.demo.train_heads [--out FOLDER]

Writes into the folder ``r2r/default_router.pt`` (``default_router_all.pt`` holds the frozen embedding too),
``citer/citer_mlp.pth``, ``collm_small/`` (a copy of small with a defer token) and ``heads.json`` (quality and
thresholds).  Thresholds are chosen on training questions of their own; evaluation prompts are never touched.
Takes about two minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from recipes.demo import calibrate, co_llm, heads
from recipes.demo.calibrate import Goal, Trial
from recipes.demo.decoder import Decoder
from recipes.demo.positions import Positions, collect, fit
from recipes.demo.tasks import problems
from recipes.demo.tokenizer import amend_json

HERE = Path(__file__).parent
R2R_WIDTHS = (64, 64, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    small: Path
    large: Path
    out: Path
    per_task: int
    val: int
    target: float
    collm_steps: int
    collm_lr: float


@dataclass(frozen=True, slots=True)
class Report:
    """One head's entry in ``heads.json``.

    :param auc: area under the curve of its score against divergence.
    :param loss: validation loss; Co-LLM's is that of the last batch.
    """

    params: int
    auc: float
    loss: float
    validation: list[Trial]

    def entry(self) -> dict[str, object]:
        """As JSON, with the threshold that the last trial settled."""
        return {**asdict(self), "threshold": self.validation[-1].threshold}


def train_r2r(small: Decoder, large: Decoder, data: Positions, goal: Goal, directory: Path) -> Report:
    """R2R: binary cross-entropy on divergence, the classes balanced."""
    head = heads.R2RHead(data.hidden.shape[1], small.embedding, R2R_WIDTHS)
    parameters = [p for name, p in head.named_parameters() if not name.startswith("token_embeddings")]
    largest = heads.top_logits(data.logits)
    balance = (1 - data.divergent.mean()) / data.divergent.mean()

    def loss_of(at: Tensor) -> Tensor:
        logits = head(data.hidden[at], data.choices[at], largest[at])
        return F.binary_cross_entropy_with_logits(logits, data.divergent[at], pos_weight=balance)

    loss = fit(parameters, loss_of, data, epochs=10, lr=2e-3, weight_decay=5e-4, module=head)
    with torch.no_grad():
        scores = head(data.hidden, data.choices, largest).sigmoid()[data.validation]
    auc = calibrate.area_under_curve(scores, data.divergent[data.validation])
    print(f"R2R: AUC {auc:.4f}, loss {loss:.4f}", flush=True)
    trials = calibrate.choose(
        lambda threshold: heads.r2r(head, threshold), calibrate.candidates(scores), small, large, goal
    )
    save_r2r(head, trials[-1].threshold, directory)
    return Report(sum(p.numel() for p in parameters), auc, loss, trials)


def save_r2r(head: heads.R2RHead, threshold: float, directory: Path) -> None:
    """Write the head with and without its frozen embedding, with the keys of the published checkpoints."""
    described = {
        "model_type": "HiddenStatesTokenLMHeadLogitsClassifier",
        "init_args": {
            "pretrained_model_name": "small",
            "hidden_states_size": head.logits_projection.out_features,
            "logits_size": heads.TOP_LOGITS,
            "hidden_dims": list(R2R_WIDTHS),
            "expansion_factor": 4,
            "dropout_rate": 0.1,
            "use_position_embedding": False,
            "freeze_lm_head": True,
            "normalize_input": False,
            "dtype": "float32",
        },
        "common_args": {"threshold": threshold, "input_type": ["hidden_states", "token", "logits"]},
        "model_specific_args": {},
    }
    weights = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    slim = {name: tensor for name, tensor in weights.items() if not name.startswith("token_embeddings")}
    directory.mkdir(parents=True, exist_ok=True)
    torch.save({**described, "state_dict": weights}, directory / "default_router_all.pt")
    torch.save({**described, "state_dict": slim}, directory / "default_router.pt")


def train_citer(small: Decoder, large: Decoder, data: Positions, goal: Goal, directory: Path) -> Report:
    """CITER: cross-entropy on the small model's token being the large one's."""
    head = heads.CiterHead(data.hidden.shape[1])

    def loss_of(at: Tensor) -> Tensor:
        confidence = head(data.hidden[at]).clamp(1e-7, 1 - 1e-7)
        return F.binary_cross_entropy(confidence, 1 - data.divergent[at])

    loss = fit(list(head.parameters()), loss_of, data, epochs=10, lr=2e-3, module=head)
    with torch.no_grad():
        confidence = head(data.hidden)[data.validation]
    auc = calibrate.area_under_curve(-confidence, data.divergent[data.validation])
    print(f"CITER: AUC {auc:.4f}, loss {loss:.4f}", flush=True)
    thresholds = [round(1 - doubt, 5) for doubt in calibrate.candidates(1 - confidence)]
    trials = calibrate.choose(lambda tau: heads.citer(head, tau), thresholds, small, large, goal)
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(head.state_dict(), directory / "citer_mlp.pth")
    return Report(sum(p.numel() for p in head.parameters()), auc, loss, trials)


def train_co_llm(
    small: Decoder, large: Decoder, data: Positions, goal: Goal, directory: Path, options: Options
) -> Report:
    """Co-LLM: fit the defer row alone, then tune the whole copy on the mixture likelihood."""
    model = co_llm.with_defer_token(options.small, co_llm.defer_row(data, small.embedding))
    rng = Random(32)
    loss = co_llm.tune(model, rng, steps=options.collm_steps, lr=options.collm_lr)
    co_llm.save(model, directory)
    tuned = Decoder(directory)
    scores, divergent = co_llm.defer_scores(tuned, co_llm.unseen(rng, 160))
    auc = calibrate.area_under_curve(scores, divergent)
    print(f"Co-LLM: AUC {auc:.4f}, loss {loss:.4f}", flush=True)
    trials = calibrate.choose(
        lambda eta: heads.co_llm(co_llm.DEFER_ID, eta), calibrate.candidates(scores), tuned, large, goal
    )
    amend_json(directory / "config.json", {"defer_threshold": trials[-1].threshold})
    return Report(model.num_parameters(), auc, loss, trials)


def train(options: Options) -> None:
    """Train all heads on the same data."""
    torch.manual_seed(0)
    start = time.perf_counter()
    small, large = Decoder(options.small), Decoder(options.large)
    data = collect(small, large, options.per_task)
    print(f"{len(data.divergent):,} positions, {data.divergent.mean():.4f} of them divergent", flush=True)
    goal = Goal(problems(options.val, 31, held_out=False), options.target)
    reports = {
        "r2r": train_r2r(small, large, data, goal, options.out / "r2r"),
        "citer": train_citer(small, large, data, goal, options.out / "citer"),
        "collm": train_co_llm(small, large, data, goal, options.out / "collm_small", options),
    }
    entries = {name: report.entry() for name, report in reports.items()}
    (options.out / "heads.json").write_text(json.dumps(entries, indent=1) + "\n")
    print(f"{time.perf_counter() - start:.0f} s")


def parse() -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.demo.train_heads", description="Train router heads."
    )
    parser.add_argument("--small", type=Path, default=HERE / "small")
    parser.add_argument("--large", type=Path, default=HERE / "large")
    parser.add_argument("--out", type=Path, default=HERE / "heads")
    parser.add_argument("--per-task", type=int, default=150, help="training questions of each family")
    parser.add_argument(
        "--val", type=int, default=16, help="questions of each family to choose thresholds on"
    )
    parser.add_argument(
        "--target", type=float, default=0.97, help="accuracy that a threshold must reach on them"
    )
    parser.add_argument("--collm-steps", type=int, default=600)
    parser.add_argument("--collm-lr", type=float, default=1e-3)
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    train(parse())
