"""Train one Qwen3-shaped character model on the synthetic tasks, on one CPU core.

    python -m recipes.demo.train --name small --hidden 64 --layers 2 --heads 4 --kv-heads 2 --ffn 144 \\
        --lr 5e-3 --steps 13500

Writes ``OUT/NAME``: bfloat16 weights, tokenizer with chat template, generation config and ``train_log.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from random import Random
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from recipes.demo.tasks import LETTERS, TASKS, Problem, draw, draw_task, problems
from recipes.demo.tokenizer import (
    BOS,
    CONTEXT_LENGTH,
    EOS,
    LOGITS_WIDTH,
    PAD,
    ROPE_THETA,
    answer_ids,
    prompt_ids,
    save_checkpoint,
)

WARMUP_STEPS = 150
POOL = 384
REPORT_SECONDS = 120
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The shape of the model and how it is trained; the command line has one flag for each."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    lr: float
    steps: int
    head_dim: int = 32
    batch_tokens: int = field(default=1024, metadata={"help": "tokens of one step, padding included"})
    seed: int = 1
    warm: float = field(
        default=0.3, metadata={"help": "share of the run that mixes in copying of random strings"}
    )
    max_seconds: float | None = field(
        default=None, metadata={"help": "end the schedule after this time, if sooner"}
    )
    bf16: bool = field(default=False, metadata={"help": "autocast to bfloat16; pays for the large model"})
    compile: bool = field(default=False, metadata={"help": "torch.compile the step; needs a C++ compiler"})
    start_from: Path | None = field(default=None, metadata={"help": "take the weights of this checkpoint"})
    out: Path = field(
        default=Path(__file__).parent, metadata={"help": "folder of the new checkpoint's folder"}
    )


class Schedule:
    """How far the run is, in steps or in time, whichever is further."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._start = time.perf_counter()
        self.step = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @property
    def progress(self) -> float:
        """From 0 at the start to 1 at the end."""
        by_step = self.step / self._options.steps
        limit = self._options.max_seconds
        return by_step if limit is None else max(by_step, self.seconds / limit)

    @property
    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine down to 2 %."""
        rise = min(1.0, (self.step + 1) / WARMUP_STEPS)
        fall = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.progress))
        return self._options.lr * rise * fall


def build(options: Options) -> Qwen3ForCausalLM:
    """A fresh model, or the weights of ``start_from`` in the same shape."""
    config = Qwen3Config(
        vocab_size=LOGITS_WIDTH,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.head_dim,
        intermediate_size=options.ffn,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        # So few dimensions need a wide initialiser, and sharp attention from the start: with the usual values
        # these models spend most of their short run on learning to look at one character.
        initializer_range=0.06,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    # The backward pass of the fused attention is slow on a CPU.
    config._attn_implementation = "eager"
    model = Qwen3ForCausalLM(config)
    if options.start_from:
        earlier = Qwen3ForCausalLM.from_pretrained(options.start_from, dtype=torch.float32)
        model.load_state_dict(earlier.state_dict())
        return model
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data.fill_(2.0)
        layer.self_attn.k_norm.weight.data.fill_(2.0)
    return model


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of a prompt with its answer; the first ``prompt`` of them are not trained on."""

    ids: list[int]
    prompt: int


def example(rng: Random, options: Options, progress: float) -> Example:
    """A training example fit for this point of the run: copying and short ledgers come first."""
    if progress < options.warm and rng.random() < 0.4:
        text = "".join(rng.choice(LETTERS + "0123456789") for _ in range(rng.randint(4, 24)))
        problem = Problem("copy", f"Copy {text}", text)
    else:
        task = draw_task(rng)
        short = progress < options.warm + 0.1 or rng.random() < 0.4
        problem = draw(rng, task, short_ledger=short)
    prompt = prompt_ids(problem.question)
    return Example(prompt + answer_ids(problem.answer), len(prompt))


def batches(rng: Random, options: Options, schedule: Schedule) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels [n, L] without end; examples of like length share a batch."""
    while True:
        pool = [example(rng, options, schedule.progress) for _ in range(POOL)]
        groups: list[list[Example]] = [[]]
        for item in sorted(pool, key=lambda item: len(item.ids)):
            if groups[-1] and (len(groups[-1]) + 1) * len(item.ids) > options.batch_tokens:
                groups.append([])
            groups[-1].append(item)
        rng.shuffle(groups)
        # A batch of one would have torch.compile specialise on it.
        yield from (collate(group if len(group) > 1 else group * 2) for group in groups)


def collate(group: list[Example]) -> tuple[Tensor, Tensor]:
    """Right-padded inputs and labels; prompt and padding carry the label that the loss ignores."""
    shape = len(group), max(len(item.ids) for item in group)
    inputs, labels = torch.full(shape, PAD), torch.full(shape, IGNORED)
    for row, item in enumerate(group):
        inputs[row, : len(item.ids)] = torch.tensor(item.ids)
        labels[row, item.prompt : len(item.ids)] = torch.tensor(item.ids[item.prompt :])
    return inputs, labels


@torch.no_grad()
def held_out_exactness(model: Qwen3ForCausalLM, per_task: int) -> dict[str, float]:
    """Share of held-out answers that greedy decoding would reproduce character by character, per task."""
    model.eval()
    result = {}
    for task in TASKS:
        exact = 0
        for problem in problems(per_task, 12345, tasks=[task]):
            prompt, answer = prompt_ids(problem.question), answer_ids(problem.answer)
            logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits
            exact += logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == answer
        result[task] = round(exact / per_task, 3)
    model.train()
    return {**result, "mean": round(fmean(result.values()), 3)}


def save(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write a bfloat16 copy."""
    stored = copy.deepcopy(model).bfloat16().eval()
    stored.config.dtype = torch.bfloat16
    save_checkpoint(stored, directory)


def train(options: Options) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rng = Random(options.seed * 7919)
    model = build(options)
    model.train()
    print(f"{model.num_parameters():,} parameters", flush=True)
    optimiser = torch.optim.AdamW(
        model.parameters(), options.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    schedule = Schedule(options)
    forward = torch.compile(model, dynamic=True) if options.compile else model
    directory = options.out / options.name
    tokens = 0
    average = math.nan
    next_report = REPORT_SECONDS
    for inputs, labels in batches(rng, options, schedule):
        if schedule.progress >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = schedule.learning_rate
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
            logits = forward(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step += 1
        tokens += inputs.numel()
        average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
        if schedule.seconds > next_report:
            next_report += REPORT_SECONDS
            report(schedule, tokens, average, held_out_exactness(model, 16))
            save(model, directory)
    seconds = schedule.seconds
    save(model, directory)
    exactness = held_out_exactness(model, 40)
    report(schedule, tokens, average, exactness)
    log = {
        "params": model.num_parameters(),
        "steps": schedule.step,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(time.process_time(), 1),
        "loss": average,
        "teacher_forced_exact": exactness,
        "args": {name: value for name, value in asdict(options).items() if name != "out"},
    }
    (directory / "train_log.json").write_text(json.dumps(log, indent=1, default=str) + "\n")


def report(schedule: Schedule, tokens: int, loss: float, exactness: dict[str, float]) -> None:
    print(
        f"{schedule.seconds:.0f} s, step {schedule.step}, {tokens / 1e6:.2f} M tokens, "
        f"loss {loss:.4f}, exact {exactness}",
        flush=True,
    )


def parse() -> Options:
    """Options from the command line, one flag per field."""
    parser = argparse.ArgumentParser(prog="python -m recipes.demo.train", description="Train one demo model.")
    types = {"str": str, "int": int, "float": float, "Path": Path}
    for option in fields(Options):
        flag, text = f"--{option.name.replace('_', '-')}", option.metadata.get("help")
        if option.type == "bool":
            parser.add_argument(flag, action="store_true", help=text)
        elif option.default is MISSING:
            parser.add_argument(
                flag, type=types[str(option.type).removesuffix(" | None")], required=True, help=text
            )
        else:
            parser.add_argument(
                flag, type=types[str(option.type).removesuffix(" | None")], default=option.default, help=text
            )
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(parse())
