"""Decode steps of vLLM, one after the other on demand; ``bench.step`` starts it in vLLM's own environment.

``python bench/vllm_step.py MODEL MODE``, where MODE is ``eager`` or ``compiled``.  Commands on its input:
``open N`` puts N requests before their first decode step, ``step`` runs one step and answers with its seconds
and how many of them the model executor took.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
PROMPT, MOST = 240, 1500


def main(path: str, mode: str) -> None:
    """Load the model and obey."""
    os.environ.update(ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=path,
            dtype="bfloat16",
            enforce_eager=mode == "eager",
            block_size=32,
            max_model_len=2048,
            max_num_seqs=32,
            skip_tokenizer_init=True,
        )
    )
    executor: Any = engine.engine_core.engine_core.model_executor
    execute, taken = executor.execute_model, [0.0]

    def timed(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = execute(*arguments, **options)
        taken[0] += time.perf_counter() - started
        return result

    executor.execute_model = timed
    settings = SamplingParams(temperature=0, max_tokens=MOST, ignore_eos=True, detokenize=False)
    opened: list[str] = []
    made = 0
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "open":
            engine.abort_request(opened, internal=True)
            opened = []
            for _ in range(int(arguments[0])):
                made += 1
                prompt = [(made * 7919 + position * 104729) % 8191 + 1 for position in range(PROMPT)]
                opened.append(
                    engine.add_request(str(made), {"prompt_token_ids": prompt}, settings) or str(made)
                )
            # The prompts, and the first steps of a new batch size.
            for _ in range(40):
                engine.step()
            print("open", file=answers, flush=True)
        else:
            taken[0] = 0.0
            started = time.perf_counter()
            engine.step()
            print(time.perf_counter() - started, taken[0], file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
