"""Log-likelihoods of the demo's large model, straight from ``transformers``.

::

    echo '[["context", "continuation"], ...]' | python -m tests.clients.direct

prints ``[[log-likelihood, greedy], ...]``.  Runs where torch is; the clients' environment has none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).parents[2] / "recipes" / "demo" / "large"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    results = []
    for context, continuation in json.load(sys.stdin):
        ids = tokenizer(context + continuation, add_special_tokens=False).input_ids
        start = len(tokenizer(context, add_special_tokens=False).input_ids)
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        rows, wanted = logprobs[start - 1 : len(ids) - 1], torch.tensor(ids[start:])
        total = rows.gather(1, wanted[:, None]).sum().item()
        results.append([total, bool((rows.argmax(-1) == wanted).all())])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
