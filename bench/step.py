"""Time of one decode step: the torch engine beside a bare forward pass, transformers and vLLM.

::

    python -m bench.step [--vllm-python .venv-vllm/bin/python]

All decode with the same 29 M random weights in bfloat16, at batch 1, 4, 8 and 32 and a context of about 256
tokens, on one thread.  The bare forward is the same mathematics over one contiguous KV cache of equally long
rows, with plain matrices: no slots, no bookkeeping, and not a line of the engine.  vLLM's CPU build runs in
processes of its own, eagerly and compiled (``vllm``); of its steps, the part of its model executor is told
apart (``model``), which leaves out its scheduler.  vLLM is also measured with the huge pages that tokenflow
asks for (``pages``).  The steps of all alternate, so that all see the same machine.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from bench.compare.servers import program
from bench.shapes import MID, Shape, random_weights, write_model
from tokenflow.engines.base import Extend
from tokenflow.engines.torch import TorchEngine
from tokenflow.settings import worker_environment
from tokenflow.types import ModelConfig

RESULTS = Path(__file__).parent / "results" / "step.json"
BATCHES = (1, 4, 8, 32)
FIRST, LAST = 240, 272
"""A round decodes from the first of these contexts to the last, then starts again."""

Step = Callable[[int], Tensor]
"""Decodes at a position (every row feeds one token there) and returns the logits."""


def token(row: int, position: int) -> int:
    """What row ``row`` feeds at ``position``."""
    return (row * 7919 + position * 104729) % (MID.vocab - 1) + 1


class Bare:
    """The layers over contiguous keys and values of equally long rows, written as fast as they can be."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor], batch: int, length: int) -> None:
        self.shape = shape
        self.embed = weights["model.embed_tokens.weight"]
        scale = math.sqrt(shape.hidden)
        self.norm = weights["model.norm.weight"].float() * scale
        head_scale = math.sqrt(shape.head_dim)
        self.layers = []
        for index in range(shape.layers):
            layer = {
                name.removeprefix(f"model.layers.{index}.").removesuffix(".weight"): tensor
                for name, tensor in weights.items()
                if name.startswith(f"model.layers.{index}.")
            }
            qkv = torch.cat([layer[f"self_attn.{name}_proj"] for name in "qkv"])
            qk_norm = torch.cat(
                (
                    layer["self_attn.q_norm"].expand(shape.heads, -1),
                    layer["self_attn.k_norm"].expand(shape.kv_heads, -1),
                )
            )
            self.layers.append(
                (
                    layer["input_layernorm"].float() * scale,
                    qkv,
                    qk_norm.float() * head_scale,
                    layer["self_attn.o_proj"],
                    layer["post_attention_layernorm"].float() * scale,
                    torch.cat((layer["mlp.gate_proj"], layer["mlp.up_proj"])),
                    layer["mlp.down_proj"],
                )
            )
        rows = (batch, shape.kv_heads, length, shape.head_dim)
        self.keys = [torch.zeros(rows, dtype=torch.bfloat16) for _ in self.layers]
        self.values = [torch.zeros(rows, dtype=torch.bfloat16) for _ in self.layers]
        channels = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.arange(length)[:, None] * shape.theta**-channels
        self.cos = torch.cat((angles.cos(), angles.cos()), 1).bfloat16()
        self.sin = torch.cat((-angles.sin(), angles.sin()), 1).bfloat16()
        self.hidden_floor = torch.tensor(math.sqrt(shape.hidden * shape.eps))
        self.head_floor = torch.tensor(math.sqrt(shape.head_dim * shape.eps))

    @staticmethod
    def rms(x: Tensor, scale: Tensor, floor: Tensor) -> Tensor:
        wide = x.float()
        return (wide / torch.hypot(torch.linalg.vector_norm(wide, 2, -1, True), floor)).mul_(scale).bfloat16()

    def __call__(self, ids: Tensor, position: int) -> Tensor:
        s = self.shape
        batch, group = len(ids), s.heads // s.kv_heads
        cos, sin = self.cos[position], self.sin[position]
        x = F.embedding(ids, self.embed)
        for index, (norm1, qkv_weight, qk_norm, out, norm2, gate_up, down) in enumerate(self.layers):
            qkv = F.linear(self.rms(x, norm1, self.hidden_floor), qkv_weight).view(batch, -1, s.head_dim)
            plain = self.rms(qkv[:, : s.heads + s.kv_heads], qk_norm, self.head_floor)
            turned = plain.roll(s.head_dim // 2, -1).mul_(sin).addcmul_(plain, cos)
            self.keys[index][:, :, position] = turned[:, s.heads :]
            self.values[index][:, :, position] = qkv[:, s.heads + s.kv_heads :]
            mixed = F.scaled_dot_product_attention(
                turned[:, : s.heads].view(batch, s.kv_heads, group, s.head_dim),
                self.keys[index][:, :, : position + 1],
                self.values[index][:, :, : position + 1],
            )
            x = x + F.linear(mixed.reshape(batch, -1), out)
            gate, up = F.linear(self.rms(x, norm2, self.hidden_floor), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate).mul_(up), down)
        return F.linear(self.rms(x, self.norm, self.hidden_floor), self.embed)


def bare_steps(folder: Path, batch: int) -> Step:
    model = Bare(MID, random_weights(MID), batch, LAST)

    def step(position: int) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token(row, position) for row in range(batch)]), position)

    for position in range(FIRST):
        step(position)
    return step


def engine_steps(folder: Path, batch: int) -> Step:
    engine = TorchEngine(ModelConfig(path=str(folder), max_requests=batch, prefix_cache=False))
    slots = []
    for row in range(batch):
        prompt = [token(row, position) for position in range(FIRST)]
        slot, _ = engine.open(prompt)
        engine.step([Extend(slot, prompt, "none")])
        slots.append(slot)

    def step(position: int) -> Tensor:
        if position == FIRST:
            for slot in slots:
                engine.truncate(slot, FIRST)
        return engine.step([Extend(slot, [token(row, position)]) for row, slot in enumerate(slots)]).logits

    return step


def transformers_steps(folder: Path, batch: int) -> Step:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    cache = DynamicCache(config=model.config)
    given = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def run(ids: list[list[int]]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor(ids), logits_to_keep=1, **{given: cache}).logits[:, -1]
        return logits

    run([[token(row, position) for position in range(FIRST)] for row in range(batch)])

    def step(position: int) -> Tensor:
        if position == FIRST and cache.get_seq_length() > FIRST:
            cache.crop(FIRST - LAST)
        return run([[token(row, position)] for row in range(batch)])

    return step


class Vllm:
    """vLLM in a process of its own (``bench/vllm_step.py``).

    :param mode: ``eager`` or ``compiled``.
    :param pages: whether weights may lie in huge pages.
    """

    def __init__(self, python: Path, folder: Path, mode: str, pages: bool) -> None:
        environment = dict(os.environ)
        if not pages:
            environment.pop("GLIBC_TUNABLES", None)
        command = [str(python), str(Path(__file__).parent / "vllm_step.py"), str(folder), mode]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def open(self, batch: int) -> None:
        """Put as many requests before their next decode step."""
        self._ask(f"open {batch}")

    def step(self) -> tuple[float, float]:
        """Run one; seconds of the whole, and of the model executor."""
        whole, model = self._ask("step").split()
        return float(whole), float(model)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, command: str) -> str:
        print(command, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        raise SystemExit(f"vLLM ended: {self._process.wait()}")


def measure(folder: Path, batch: int, rounds: int, peers: Mapping[str, Vllm]) -> dict[str, float]:
    """Milliseconds per step, minimum and median, and how far the logits of ours are apart."""
    makers = {"bare": bare_steps, "engine": engine_steps, "transformers": transformers_steps}
    steps = {name: make(folder, batch) for name, make in makers.items()}
    for peer in peers.values():
        peer.open(batch)
    times: dict[str, list[float]] = {name: [] for name in steps}
    times |= {f"{name}{part}": [] for name in peers for part in ("", "_model")}
    logits: dict[str, Tensor] = {}
    for _ in range(rounds):
        for position in range(FIRST, LAST):
            for name, step in steps.items():
                started = time.perf_counter()
                logits[name] = step(position)
                times[name].append((time.perf_counter() - started) * 1e3)
            for name, peer in peers.items():
                whole, model = peer.step()
                times[name].append(whole * 1e3)
                times[f"{name}_model"].append(model * 1e3)
    result: dict[str, float] = {"batch": batch}
    for name, taken in times.items():
        result[f"{name}_min_ms"] = round(min(taken), 3)
        result[f"{name}_median_ms"] = round(statistics.median(taken), 3)
    for kind in ("min", "median"):
        for name in times:
            if name != "engine":
                ratio = result[f"engine_{kind}_ms"] / result[f"{name}_{kind}_ms"]
                result[f"engine_over_{name}_{kind}"] = round(ratio, 3)
    for name in ("bare", "transformers"):
        gap = (logits["engine"].float() - logits[name].float()).abs().max()
        result[f"largest_logit_gap_to_{name}"] = round(float(gap), 4)
    result["largest_logit"] = round(float(logits["engine"].float().abs().max()), 4)
    return result


def show(rows: Sequence[Mapping[str, float]]) -> None:
    """Print a table."""
    print(f"decode step, 29 M Qwen3 shape, bfloat16, 1 thread, context {FIRST} to {LAST}; ms: min (median)")
    names = [key.removesuffix("_min_ms") for key in rows[0] if key.endswith("_min_ms")]
    print("batch " + " ".join(f"{name:>18}" for name in names) + "   engine over each, median")
    for row in rows:
        cells = [f"{row[f'{name}_min_ms']:.2f} ({row[f'{name}_median_ms']:.2f})" for name in names]
        ratios = [f"{name} {row[f'engine_over_{name}_median']:.2f}" for name in names if name != "engine"]
        print(f"{row['batch']:>5} " + " ".join(f"{cell:>18}" for cell in cells) + "   " + ", ".join(ratios))


def main() -> None:
    """Measure, print a table, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=12, help=f"rounds of {LAST - FIRST} steps per batch size"
    )
    parser.add_argument("--vllm-python", type=program, help="of an environment with vLLM's CPU build")
    parser.add_argument("--results", type=Path, default=RESULTS, help="replaced")
    options = parser.parse_args()
    environment = worker_environment(threads=1)
    if environment != dict(os.environ):
        # The engine is measured in the environment that workers have.
        os.execve(sys.executable, [sys.executable, "-m", "bench.step", *sys.argv[1:]], environment)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary), MID)
        peers = {}
        if python := options.vllm_python:
            peers = {
                "vllm_eager": Vllm(python, folder, "eager", pages=False),
                "vllm_eager_pages": Vllm(python, folder, "eager", pages=True),
                "vllm_compiled": Vllm(python, folder, "compiled", pages=False),
            }
        rows = [measure(folder, batch, options.rounds, peers) for batch in BATCHES]
        for peer in peers.values():
            peer.close()
    show(rows)
    figures = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "shape": "29 M Qwen3: hidden 512, 8 layers, 8/4 heads of 64, vocabulary 8192, bfloat16, 1 thread",
        "context": [FIRST, LAST],
        "batches": rows,
    }
    options.results.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
