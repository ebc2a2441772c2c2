"""Measure the models alone and under routing policies, by exact simulation, greedy and in float32.

    python -m recipes.demo.evaluate policies [--prompts N] [--only TEXT ...]   two tables in Markdown
    python -m recipes.demo.evaluate check                                      against transformers
    python -m recipes.demo.evaluate speed                                      one decode step of each model

All 1,000 prompts with every policy take about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from recipes.demo import heads, policies
from recipes.demo.decoder import Decoder
from recipes.demo.policies import Rule
from recipes.demo.scores import Outcome, overall_table, score, task_table
from recipes.demo.tasks import TASKS, Problem, load_eval
from recipes.demo.tokenizer import CONTEXT_LENGTH, UNK, encode, prompt_ids

HERE = Path(__file__).parent
PROMPTS = HERE / "eval.jsonl"
CO_LLM = "heads/collm_small"
MODELS = ("small", "mid", "large")


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy over one model or two; ``rule`` is made from the loaded small model."""

    name: str
    rule: Callable[[Decoder], Rule]
    small: str = "small"
    large: str | None = "large"


@cache
def decoder(name: str) -> Decoder:
    """One of the models in this folder."""
    return Decoder(HERE / name)


def fixed(rule: Rule) -> Callable[[Decoder], Rule]:
    """A rule that needs nothing of the small model."""
    return lambda _: rule


def alone(name: str, model: str) -> Setting:
    """One model without a partner."""
    return Setting(name, fixed(policies.small_only), model, None)


def settings() -> list[Setting]:
    """Every setting of results.md, in its order."""
    chosen = json.loads((HERE / "heads/heads.json").read_text())
    r2r, citer, collm = (float(chosen[name]["threshold"]) for name in ("r2r", "citer", "collm"))
    return [
        *(alone(f"{model} only", model) for model in ("large", "small", "mid")),
        Setting("oracle (tokens differ)", fixed(policies.oracle)),
        *(Setting(f"random {share}", fixed(policies.at_random(share))) for share in (0.05, 0.2)),
        *(
            Setting(f"R-Stitch tau={tau}", fixed(policies.r_stitch(tau)))
            for tau in (0.01, 0.03, 0.05, 0.1, 0.2, 0.3)
        ),
        *(
            Setting(f"confidence < {bound}", fixed(policies.confidence_below(bound)))
            for bound in (0.5, 0.7, 0.9, 0.97)
        ),
        Setting(
            f"R2R head, threshold {r2r}",
            lambda small: heads.r2r(
                heads.load_r2r(HERE / "heads/r2r/default_router.pt", small.embedding), r2r
            ),
        ),
        Setting(
            f"CITER head, tau={citer}",
            lambda _: heads.citer(heads.load_citer(HERE / "heads/citer/citer_mlp.pth"), citer),
        ),
        Setting(
            f"Co-LLM, eta={collm}", lambda small: heads.co_llm(small.config.defer_token_id, collm), CO_LLM
        ),
        Setting("mid + large, R-Stitch tau=0.1", fixed(policies.r_stitch(0.1)), "mid", "large"),
        Setting("small + mid, R-Stitch tau=0.1", fixed(policies.r_stitch(0.1)), "small", "mid"),
        alone("Co-LLM's copy of small, alone", CO_LLM),
    ]


def run(setting: Setting, problems: list[Problem]) -> list[Outcome]:
    """Answer all problems under one setting."""
    small = decoder(setting.small)
    large = decoder(setting.large) if setting.large else None
    responses = policies.simulate(problems, setting.rule(small), small, large)
    outcomes = [response.outcome(problem) for response, problem in zip(responses, problems, strict=True)]
    if setting.small == "large":
        return [dataclasses.replace(outcome, large_tokens=outcome.tokens) for outcome in outcomes]
    return outcomes


def measure_policies(prompts: int | None, only: list[str]) -> None:
    problems = load_eval(PROMPTS, prompts)
    chosen = [s for s in settings() if not only or any(text in s.name for text in only)]
    if not chosen:
        sys.exit(f"error: no setting matches {only}; there are {[s.name for s in settings()]}")
    results: dict[str, list[Outcome]] = {}
    for setting in chosen:
        start = time.perf_counter()
        results[setting.name] = run(setting, problems)
        total = score(results[setting.name])
        print(
            f"{setting.name}: accuracy {total.accuracy:.3f}, LLM share {total.share:.4f}, "
            f"{time.perf_counter() - start:.0f} s",
            file=sys.stderr,
        )
    print(f"{len(problems)} prompts\n\n{overall_table(results)}\n\n{task_table(results)}")


def check() -> None:
    """Compare texts with ``generate`` of transformers, and the tokenizer with the one of the files."""
    loaded = load_eval(PROMPTS)
    problems = [p for task in TASKS for p in [p for p in loaded if p.task == task][:6]]
    wrong = 0
    for name in (*MODELS, CO_LLM):
        tokenizer: Any = AutoTokenizer.from_pretrained(HERE / name)
        model = AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32).eval()
        ours = decoder(name)
        never = [ours.defer_id] if ours.defer_id is not None else None
        responses = policies.simulate(problems, policies.small_only, ours)
        texts = tokens = 0
        for problem, response in zip(problems, responses, strict=True):
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": problem.question}], add_generation_prompt=True, return_dict=False
            )
            tokens += (
                ids != prompt_ids(problem.question)
                or tokenizer.decode(encode(problem.answer)) != problem.answer
            )
            written = model.generate(torch.tensor([ids]), suppress_tokens=never)[0, len(ids) :]
            texts += tokenizer.decode(written, skip_special_tokens=True) != response.text
        print(
            f"{name}: {model.num_parameters():,} parameters, {len(tokenizer)} ids: of {len(problems)} "
            f"prompts {texts} texts differ from transformers, {tokens} are encoded differently"
        )
        wrong += texts + tokens
    if wrong:
        sys.exit(1)


@torch.inference_mode()
def measure_speed() -> None:
    """Median decode step of the three models with the KV cache of transformers, one thread."""
    for batch in (1, 8):
        smallest = 0.0
        for name in MODELS:
            model = Qwen3ForCausalLM.from_pretrained(HERE / name, dtype=torch.float32).eval()
            tokens = torch.randint(UNK + 1, 100, (batch, 61))
            cache = model(input_ids=tokens[:, :-1], use_cache=True).past_key_values
            seconds = []
            for _ in range(120):
                start = time.perf_counter()
                model(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
                seconds.append(time.perf_counter() - start)
            assert cache.get_seq_length() < CONTEXT_LENGTH
            step = statistics.median(seconds)
            smallest = smallest or step
            print(
                f"batch {batch}, {name}: {model.num_parameters():,} parameters, "
                f"{step * 1e3:.2f} ms per step, {step / smallest:.1f} x small"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.demo.evaluate", description="Measure the demo models."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("policies", help="accuracy and LLM share of routing policies")
    table.add_argument("--prompts", type=int, metavar="N", help="only the first N prompts")
    table.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="only settings whose name has TEXT in it"
    )
    commands.add_parser("check", help="compare with transformers")
    commands.add_parser("speed", help="time a decode step of each model")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if args.command == "policies":
        measure_policies(args.prompts, args.only)
    elif args.command == "check":
        check()
    else:
        measure_speed()


if __name__ == "__main__":
    main()
