"""Standard serving: a vLLM engine per model in one program, and a dispatcher that switches between them.

The program is the dispatcher (vLLM's ``AsyncLLM``); each engine runs in a process of its own.  A switch is a
new request, whose prompt is all that was written so far; prefix caching finds what the engine has seen of it,
in blocks of 32 tokens, the smallest that vLLM has on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from bench.compare import traces
from bench.compare.load import Emit

BLOCK, CONTEXT, MOST_REQUESTS = 32, 4096, 16


class InProcess:
    """See :class:`bench.compare.serve.Server`.

    With ``variant`` ``visit``, a visit is one request for as many tokens as the trace says.  That favours
    it: a real dispatcher does not know beforehand when a rule will fire.  With ``token``, every token is a
    request, as in the TokenRouter paper: the dispatcher looks at each before it goes on.
    """

    at_a_time = 0

    def __init__(self) -> None:
        self._engines: list[AsyncLLM] = []
        self._ids = itertools.count()

    async def open(self, paths: Sequence[Path], dtype: str) -> None:
        self._engines = [
            AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    model=str(path),
                    dtype=dtype,
                    block_size=BLOCK,
                    enable_prefix_caching=True,
                    max_model_len=CONTEXT,
                    max_num_seqs=MOST_REQUESTS,
                    skip_tokenizer_init=True,
                    disable_log_stats=True,
                )
            )
            for path in paths
        ]

    async def generate(self, index: int, prompt: list[int], trace: str, variant: str, emit: Emit) -> None:
        tokens = list(prompt)
        for call in traces.calls(trace, variant):
            settings = SamplingParams(
                temperature=0.0,
                max_tokens=call.kept + call.drops,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine, left = self._engines[call.model], call.kept
            async for output in engine.generate(
                {"prompt_token_ids": list(tokens)}, settings, str(next(self._ids))
            ):
                for token in output.outputs[0].token_ids[:left]:
                    tokens.append(token)
                    emit(token, call.model)
                    left -= 1

    def drain(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        for engine in self._engines:
            engine.shutdown()
        self._engines = []
