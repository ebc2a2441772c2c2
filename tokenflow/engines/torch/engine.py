"""The torch engine: weights, KV cache and forward pass behind the engine protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tokenflow.engines.base import EngineInfo, Extend, Feed, Opened, Scores, StepOutput
from tokenflow.engines.checks import check_feeds, check_score
from tokenflow.engines.memory import cpu_budget, tokens_for
from tokenflow.engines.torch.config import ModelSpec, read_spec
from tokenflow.engines.torch.kv import KVCache, Plan
from tokenflow.engines.torch.model import forward
from tokenflow.engines.torch.paged import PagedCache
from tokenflow.engines.torch.rope import Rope
from tokenflow.engines.torch.rows import RowCache
from tokenflow.engines.torch.weights import DTYPES, load_weights
from tokenflow.errors import EngineError, ModelLoadError
from tokenflow.types import ModelConfig

Result = TypeVar("Result")

_GPU_SHARE = 2
_SCORE_CHUNK = 512
_SCORE_LOGITS = 2**24


class TorchEngine:
    """A dense decoder in plain torch; see :class:`tokenflow.engines.base.Engine`.

    :param paged: lay the KV cache out in blocks; by default on a GPU only.
    :param block_size: tokens per block of a paged cache.
    :raises ModelNotFound: if ``config.path`` is no directory.
    :raises UnsupportedModel: for an architecture or option that is not implemented.
    :raises ModelLoadError: if the model or its KV cache cannot be loaded.
    """

    def __init__(self, config: ModelConfig, *, paged: bool | None = None, block_size: int = 16) -> None:
        device = _device(config.device)
        if config.dtype != "auto" and config.dtype not in DTYPES:
            raise ModelLoadError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {config.dtype!r}")
        path = Path(config.path)
        self._spec = spec = read_spec(path, config.context_length)
        self._device = device
        try:
            self._weights = load_weights(path, spec, config.dtype, device)
            self._dtype = self._weights.embed.dtype
            self._rope = Rope(spec.rope, spec.head_dim, self._dtype, device)
            self._cache: KVCache = _cache(
                spec,
                self._dtype,
                device,
                config,
                device.type != "cpu" if paged is None else paged,
                block_size,
            )
        except RuntimeError as error:
            raise ModelLoadError(
                f"{path}: the weights or the KV cache do not fit on {device}: {error}; "
                "choose a smaller dtype, kv_cache or context_length, or another device"
            ) from error
        self._info = EngineInfo(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            context_length=spec.context_length,
            kv_capacity=self._cache.capacity,
            block_size=self._cache.block_size,
            max_requests=config.max_requests,
            eos_token_ids=spec.eos_token_ids,
            device=str(device),
            dtype=str(self._dtype).removeprefix("torch."),
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def embeddings(self) -> Tensor:
        return self._weights.embed

    def open(self, tokens: Sequence[int]) -> Opened:
        return self._cache.open(tokens)

    def step(self, extends: Sequence[Extend]) -> StepOutput:
        feeds = [Feed(extend.slot, extend.tokens) for extend in extends]
        check_feeds(feeds, self._cache.length, self._spec.context_length, self._spec.vocab_size)
        plan = self._cache.plan(feeds)
        wanted = _wanted(extends, plan, self._device)
        return self._run(
            self._cache, plan, wanted, lambda hidden: StepOutput(self._weights.head(hidden), hidden)
        )

    def length(self, slot: int) -> int:
        return self._cache.length(slot)

    def truncate(self, slot: int, length: int) -> None:
        self._cache.truncate(slot, length)

    def release(self, slot: int) -> None:
        self._cache.release(slot)

    def score(self, tokens: Sequence[int], top: int = 0) -> Scores:
        """See the protocol.  Runs over a KV cache of its own, so that it never takes room from open slots."""
        count = len(tokens)
        check_score(tokens, self._spec.context_length, self._spec.vocab_size)
        cache = RowCache(
            self._spec,
            self._dtype,
            self._device,
            row_length=count,
            capacity=count,
            max_open=1,
            reuse=False,
        )
        slot, _ = cache.open(tokens)
        parts = []
        for start in range(0, count - 1, _SCORE_CHUNK):
            stop = min(start + _SCORE_CHUNK, count - 1)
            targets = torch.tensor(tokens[start + 1 : stop + 1], device=self._device)
            plan = cache.plan([Feed(slot, tokens[start:stop])])
            parts += self._run(cache, plan, None, partial(self._score_rows, targets=targets, top=top))
        logprobs, ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
        return Scores(logprobs, ids, values)

    def close(self) -> None:
        del self._cache, self._weights
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(
        self, cache: KVCache, plan: Plan, wanted: Tensor | None, finish: Callable[[Tensor], Result]
    ) -> Result:
        """Run a plan and make its hidden states into a result; the plan counts if all of that went well."""
        try:
            with torch.inference_mode():
                result = finish(forward(self._spec, self._weights, self._rope, cache, plan, wanted))
        except RuntimeError as error:
            cache.abandon(plan)
            raise EngineError(f"forward pass of {len(plan.ids)} tokens failed: {error}") from error
        cache.commit(plan)
        return result

    def _score_rows(self, hidden: Tensor, targets: Tensor, top: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(log-probabilities of the targets, best ids, their log-probabilities), a few rows at a time."""
        parts = []
        rows = max(1, _SCORE_LOGITS // self._spec.vocab_size)
        for start in range(0, len(hidden), rows):
            wanted = targets[start : start + rows]
            logprobs = self._weights.head(hidden[start : start + rows]).float().log_softmax(-1)
            best = logprobs.topk(top, -1)
            parts.append((logprobs.gather(1, wanted[:, None])[:, 0], best.indices, best.values))
        return parts


def _wanted(extends: Sequence[Extend], plan: Plan, device: torch.device) -> Tensor | None:
    """Indices of the wanted tokens in the order of the extends; ``None`` for all tokens as they lie."""
    starts = [0] * len(extends)
    start = 0
    for index in plan.order:
        starts[index] = start
        start += len(extends[index].tokens)
    wanted: list[int] = []
    for extend, first in zip(extends, starts, strict=True):
        stop = first + len(extend.tokens)
        if extend.logits != "none":
            wanted += range(first if extend.logits == "all" else stop - 1, stop)
    return None if wanted == list(range(start)) else torch.tensor(wanted, dtype=torch.int64, device=device)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device {name!r} is not known: use auto, cpu, cuda or cuda:<n>") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ModelLoadError(f"device {name!r} is not there: this machine has {count} CUDA device(s)")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ModelLoadError(f"device {name!r} is not supported: use auto, cpu, cuda or cuda:<n>")
    return torch.device("cpu")


def _cache(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    config: ModelConfig,
    paged: bool,
    block_size: int,
) -> KVCache:
    capacity = config.kv_cache or _default_capacity(spec, dtype, device, config.max_requests)
    if capacity < (least := block_size if paged else 1):
        raise ModelLoadError(f"kv_cache of {capacity} tokens is too small: it must hold {least} at least")
    if paged:
        return PagedCache(
            spec,
            dtype,
            device,
            block_size=block_size,
            capacity=capacity,
            max_open=config.max_requests,
            reuse=config.prefix_cache,
        )
    return RowCache(
        spec,
        dtype,
        device,
        row_length=min(spec.context_length, capacity),
        capacity=capacity,
        max_open=config.max_requests,
        reuse=config.prefix_cache,
    )


def _default_capacity(spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_requests: int) -> int:
    """Tokens of KV cache; on a GPU within half of what the weights leave free."""
    token_bytes = 2 * spec.layers * spec.kv_heads * spec.head_dim * dtype.itemsize
    cuda = device.type == "cuda"
    budget = torch.cuda.mem_get_info(device)[0] // _GPU_SHARE if cuda else cpu_budget()
    return tokens_for(budget, token_bytes, max_requests, spec.context_length)
