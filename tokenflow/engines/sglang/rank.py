"""One rank of a model: its share of the weights and of the KV cache, and what it does on orders."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from tokenflow.engines.sglang.load import load_runner
from tokenflow.engines.sglang.orders import Copy, Embed, Map, Order, PutBack, Run, SetAside
from tokenflow.types import ModelConfig

_DECODED = 16
"""Most tokens of a request that a decode takes: each reads the whole of its KV cache again."""


class Result(NamedTuple):
    """Logits [n, V] and hidden states after the final norm [n, H] of the wanted tokens of a run."""

    logits: Tensor
    hidden: Tensor


class Rank:
    """Rank ``rank`` of ``config.tensor_parallel``.

    :param meeting: see :func:`tokenflow.engines.sglang.load.load_runner`.
    """

    def __init__(
        self,
        config: ModelConfig,
        rank: int,
        store: Store,
        meeting: int,
        *,
        cuda_graphs: bool = True,
        load_format: str = "safetensors",
    ) -> None:
        self.runner = load_runner(
            config, rank, store, meeting, cuda_graphs=cuda_graphs, load_format=load_format
        )
        # After the environment is set: importing SGLang reads it.
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._device = self.runner.device
        self._table: Tensor = self.runner.req_to_token_pool.req_to_token
        self._aside: tuple[Tensor, Any] | None = None
        self._requests = []
        for row in range(len(self._table)):
            request = Req(str(row), "", array("q"), SamplingParams())
            request.extend_end = 0
            self._requests.append(request)

    def do(self, order: Order) -> Result | Tensor | None:
        """Carry out an order; a run gives its :class:`Result`, :class:`Embed` the embeddings [V, E]."""
        with torch.inference_mode():
            match order:
                case Run():
                    return self.run(order)
                case Map(row, start, places):
                    self._table[row, start : start + len(places)] = self._integers(places, torch.int32)
                case Copy(source, target):
                    kept = self.runner.token_to_kv_pool.get_cpu_copy(self._integers(source))
                    self.runner.token_to_kv_pool.load_cpu_copy(kept, self._integers(target))
                case SetAside(places):
                    where = self._integers(places)
                    self._aside = where, self.runner.token_to_kv_pool.get_cpu_copy(where)
                case PutBack() if self._aside is not None:
                    where, kept = self._aside
                    self.runner.token_to_kv_pool.load_cpu_copy(kept, where)
                    self._aside = None
                case Embed():
                    return self._embeddings()
        return None

    def run(self, order: Run) -> Result:
        """One forward pass.

        Where no row begins and each is fed a few tokens, it is a decode with a row per token: they share
        their request's KV cache, and each sees what lies before it.  On a GPU that replays a CUDA graph.
        """
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

        tokens = len(order.ids)
        decode = (
            min(order.starts) > 0
            and max(order.counts) <= _DECODED
            and tokens <= self.runner.max_running_requests
        )
        every = order.wanted is not None and not decode
        batch = ForwardBatch.init_new(
            self._schedule(order, decode),
            self.runner,
            capture_hidden_mode=CaptureHiddenMode.FULL if every else CaptureHiddenMode.LAST,
            return_hidden_states_before_norm=False,
        )
        output = self.runner.forward(batch).logits_output
        logits, hidden = output.next_token_logits, output.hidden_states
        if every:
            hidden = hidden[self._integers(order.wanted or [])]
            return Result(self._logits(hidden, batch), hidden)
        if not decode or tokens == len(order.rows):
            return Result(logits, hidden)
        wanted = order.wanted
        if wanted is None:
            wanted = [end - 1 for end in accumulate(order.counts)]
        index = self._integers(wanted)
        return Result(logits[index], hidden[index])

    def close(self) -> None:
        """Give the memory back."""
        from sglang.srt.distributed.parallel_state import (
            destroy_distributed_environment,
            destroy_model_parallel,
        )

        del self.runner, self._table
        destroy_model_parallel()
        destroy_distributed_environment()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _schedule(self, order: Run, decode: bool) -> Any:
        """The batch as SGLang's scheduler would hand it to its model."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        ends = [start + count for start, count in zip(order.starts, order.counts, strict=True)]
        owners = [row for row, count in zip(order.rows, order.counts, strict=True) for _ in range(count)]
        spans = zip(order.starts, ends, strict=True)
        positions = [position for start, end in spans for position in range(start, end)]
        places = self._integers(order.places)
        self._table[self._integers(owners), self._integers(positions)] = places.to(torch.int32)
        rows, ends = (owners, [position + 1 for position in positions]) if decode else (order.rows, ends)
        lengths = self._integers(ends)
        return ScheduleBatch(
            reqs=[self._requests[row] for row in rows],
            req_to_token_pool=self.runner.req_to_token_pool,
            token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator,
            model_config=self.runner.model_config,
            device=self._device,
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            input_ids=self._integers(order.ids),
            req_pool_indices=self._integers(rows),
            req_pool_indices_cpu=torch.tensor(rows),
            seq_lens=lengths,
            seq_lens_cpu=torch.tensor(ends),
            orig_seq_lens=lengths.to(torch.int32),
            out_cache_loc=places,
            multimodal_inputs=[None] * len(rows),
            prefix_lens=None if decode else order.starts,
            extend_lens=None if decode else order.counts,
            extend_logprob_start_lens=None if decode else order.counts,
            extend_num_tokens=None if decode else len(order.ids),
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )

    def _logits(self, hidden: Tensor, batch: Any) -> Tensor:
        from sglang.srt.layers.logits_processor import LogitsMetadata

        model = self.runner.model
        logits: Tensor = model.logits_processor._get_logits(
            hidden, model.lm_head, LogitsMetadata.from_forward_batch(batch), use_logits_buffer=False
        )
        return logits

    def _embeddings(self) -> Tensor:
        weight: Tensor = self.runner.model.get_input_embeddings().weight
        ranks = dist.get_world_size()
        if ranks > 1:
            parts = [torch.empty_like(weight) for _ in range(ranks)]
            dist.all_gather(parts, weight.contiguous())
            weight = torch.cat(parts)
        return weight[: self.runner.model_config.vocab_size].detach()

    def _integers(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)
