"""The sglang engine: the books of rows and blocks on this side, SGLang's forward pass on the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenflow.engines.base import EngineInfo, Extend, Feed, Opened, Scores, StepOutput
from tokenflow.engines.blocks import Blocks
from tokenflow.engines.checks import check_feeds, check_score
from tokenflow.engines.sglang.crew import Crew
from tokenflow.engines.sglang.orders import Copy, Embed, Map, PutBack, Run, SetAside
from tokenflow.engines.sglang.rank import Result
from tokenflow.engines.sglang.seams import require_sglang
from tokenflow.errors import EngineError, ModelLoadError
from tokenflow.types import ModelConfig

_SCORE_CHUNK = 512


class SglangEngine:
    """A decoder model on SGLang's kernels; see :class:`tokenflow.engines.base.Engine`.

    A slot is a row of SGLang's table of places in the KV cache; row 0 is SGLang's own, the last one is for
    scoring.  Blocks and prefixes are kept in :class:`Blocks`: SGLang's scheduler, radix cache and sampler are
    not used.

    :param cuda_graphs: capture CUDA graphs for decode steps on a GPU.
    :param load_format: SGLang's name of the way in which weights are loaded (``dummy`` for none).
    :raises UnsupportedModel: without SGLang in the one version that fits, or for a model with other memory
        than a plain KV cache.
    :raises ModelLoadError: if SGLang cannot load the model.
    """

    def __init__(
        self, config: ModelConfig, *, cuda_graphs: bool = True, load_format: str = "safetensors"
    ) -> None:
        require_sglang()
        self._crew = Crew(config, cuda_graphs=cuda_graphs, load_format=load_format)
        runner = self._crew.runner
        size = runner.page_size
        slots = runner.max_running_requests - 1
        capacity = runner.max_total_num_tokens // size
        if slots < 1 or capacity < 1:
            raise ModelLoadError(
                f"kv_cache of {runner.max_total_num_tokens} tokens is too small: it must hold two blocks of "
                f"{size} at least"
            )
        model = runner.model_config
        self._size = size
        self._score_row = slots + 1
        self._books = Blocks(capacity, size, slots, config.prefix_cache, self._copy)
        self._embeddings: Tensor | None = None
        self._info = EngineInfo(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            context_length=model.context_len,
            kv_capacity=self._books.capacity,
            block_size=size,
            max_requests=min(slots, config.max_requests),
            eos_token_ids=tuple(sorted(model.hf_eos_token_id or ())),
            device="cpu" if runner.device == "cpu" else f"cuda:{runner.gpu_id}",
            dtype=str(runner.dtype).removeprefix("torch."),
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def embeddings(self) -> Tensor:
        if self._embeddings is None:
            found = self._crew.do(Embed())
            assert isinstance(found, Tensor)
            self._embeddings = found
        return self._embeddings

    def open(self, tokens: Sequence[int]) -> Opened:
        opened = self._books.open(tokens)
        if opened.cached:
            places = self._books.places(opened.slot, 0, opened.cached)
            self._crew.do(Map(opened.slot + 1, 0, places))
        return opened

    def step(self, extends: Sequence[Extend]) -> StepOutput:
        feeds = [Feed(extend.slot, extend.tokens) for extend in extends]
        check_feeds(feeds, self._books.length, self._info.context_length, self._info.vocab_size)
        self._books.reserve(feeds)
        starts = [self._books.length(slot) for slot, _ in feeds]
        counts = [len(tokens) for _, tokens in feeds]
        order = Run(
            rows=[slot + 1 for slot, _ in feeds],
            starts=starts,
            counts=counts,
            ids=[token for _, tokens in feeds for token in tokens],
            places=[
                place
                for (slot, _), start, count in zip(feeds, starts, counts, strict=True)
                for place in self._books.places(slot, start, start + count)
            ],
            wanted=_wanted(extends),
        )
        try:
            result = self._run(order)
        except EngineError:
            self._books.abandon(feeds)
            raise
        self._books.commit(feeds)
        if order.wanted is None:
            kept = [index for index, extend in enumerate(extends) if extend.logits != "none"]
            if len(kept) < len(extends):
                result = Result(result.logits[kept], result.hidden[kept])
        return StepOutput(result.logits, result.hidden)

    def length(self, slot: int) -> int:
        return self._books.length(slot)

    def truncate(self, slot: int, length: int) -> None:
        self._books.truncate(slot, length)
        start = length // self._size * self._size
        if start < length:
            # The block with the end of what is kept may be another one now.
            self._crew.do(Map(slot + 1, start, self._books.places(slot, start, length)))

    def release(self, slot: int) -> None:
        self._books.release(slot)

    def score(self, tokens: Sequence[int], top: int = 0) -> Scores:
        """See the protocol.  What lies in the blocks that scoring uses is put aside meanwhile."""
        count = len(tokens)
        check_score(tokens, self._info.context_length, self._info.vocab_size)
        if count > self._info.kv_capacity:
            raise EngineError(f"{count} tokens are more than the KV cache of {self._info.kv_capacity}")
        places = list(range(self._size, self._size + count))
        self._crew.do(SetAside(places))
        try:
            parts = [
                self._score(tokens, start, min(start + _SCORE_CHUNK, count - 1), places, top)
                for start in range(0, count - 1, _SCORE_CHUNK)
            ]
        finally:
            self._crew.do(PutBack())
        logprobs, ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
        return Scores(logprobs, ids, values)

    def close(self) -> None:
        self._crew.close()

    def _score(
        self, tokens: Sequence[int], start: int, stop: int, places: list[int], top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        result = self._run(
            Run(
                rows=[self._score_row],
                starts=[start],
                counts=[stop - start],
                ids=list(tokens[start:stop]),
                places=places[start:stop],
                wanted=list(range(stop - start)),
            )
        )
        logprobs = result.logits.float().log_softmax(-1)
        targets = torch.tensor(tokens[start + 1 : stop + 1], device=logprobs.device)
        best = logprobs.topk(top, -1)
        return logprobs.gather(1, targets[:, None])[:, 0], best.indices, best.values

    def _run(self, order: Run) -> Result:
        try:
            result = self._crew.do(order)
        except RuntimeError as error:
            raise EngineError(f"forward pass of {len(order.ids)} tokens failed: {error}") from error
        assert isinstance(result, Result)
        return result

    def _copy(self, source: int, target: int) -> None:
        size = self._size
        self._crew.do(
            Copy(
                list(range(source * size, (source + 1) * size)),
                list(range(target * size, (target + 1) * size)),
            )
        )


def _wanted(extends: Sequence[Extend]) -> list[int] | None:
    """Indices of the wanted tokens among all that are fed; ``None`` if no row wants more than its last."""
    if all(extend.logits != "all" or len(extend.tokens) == 1 for extend in extends):
        return None
    wanted: list[int] = []
    start = 0
    for extend in extends:
        stop = start + len(extend.tokens)
        if extend.logits != "none":
            wanted += range(start if extend.logits == "all" else stop - 1, stop)
        start = stop
    return wanted
