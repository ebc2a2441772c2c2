"""A worker's side of a model that is run: residents, engine, sampler and compiled route, step by step."""

from __future__ import annotations

import hashlib
import time
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path

import torch

from tokenflow.engines.base import Engine, Extend, StepOutput
from tokenflow.engines.load import load_engine
from tokenflow.engines.sampling import Sampler, peaks, unusable_rows
from tokenflow.errors import EndpointFailed, EngineError, NonFiniteLogits, ProtocolError, RouteFailed
from tokenflow.wire.messages import (
    VERSION,
    Hello,
    Ready,
    Row,
    RowDone,
    RowFailed,
    Score,
    Scored,
    Step,
    StepDone,
    ToWorker,
)
from tokenflow.worker.residents import Resident, Residents, plan
from tokenflow.worker.route import Decision, Route

_AWAKE_S = 300e-6


class ModelWorker:
    """One model with its residents, its sampler and its compiled route.

    :raises ModelLoadError: if the model cannot be loaded.
    """

    def __init__(self, hello: Hello) -> None:
        torch.set_num_threads(hello.config.threads)
        self.engine: Engine = load_engine(hello.config)
        engine = self.engine
        # Where the model runs on the CPU, the cores are needed for the others.
        self.awake_s = 0.0 if engine.info.device == "cpu" else _AWAKE_S
        self.mode: AbstractContextManager[object] = torch.inference_mode()
        self._hello = hello
        self._residents = Residents(engine)
        self._route = Route(hello, engine)
        self._sampler = Sampler(hello.code, hello.vocab_limit, hello.eos_token_ids, self._route.excluded)

    def ready(self, load_s: float) -> Ready:
        """The handshake's answer."""
        info = self.engine.info
        tokenizer = Path(self._hello.config.path) / "tokenizer.json"
        return Ready(
            version=VERSION,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            kv_capacity=info.kv_capacity,
            block_size=info.block_size,
            max_requests=info.max_requests,
            tokenizer=hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.exists() else "",
            device=info.device,
            dtype=info.dtype,
            load_s=load_s,
        )

    def wait(self) -> None:
        """Nothing: a step's results are copied from the device before there is an answer."""

    def close(self) -> None:
        """Give device memory back."""
        self.engine.close()

    def answer(self, message: ToWorker) -> Scored:
        """Score a prompt; :raises ProtocolError: for anything else."""
        if isinstance(message, Score):
            return self._score(message)
        raise ProtocolError(f"unexpected {type(message).__name__} after the handshake")

    def run(self, step: Step) -> StepDone:
        """Run a step: engine, sampler, route."""
        started = time.monotonic()
        self._residents.apply(step)
        if not step.rows:
            return StepDone(step.id, [], [], started, time.monotonic(), 0.0, 0, 0)
        residents, cached = [], 0
        for row in step.rows:
            resident, saved = self._residents.extend(row)
            residents.append(resident)
            cached += saved
        shares = plan(residents, self._hello.config.max_batch_tokens)
        running = [index for index, share in enumerate(shares) if share]
        extends = [_extend(residents[index], shares[index]) for index in running]
        before = time.monotonic()
        output = self.engine.step(extends)
        forward_s = time.monotonic() - before
        rows, failed = step.rows, []
        if output.failed:
            broken = {running[index]: why for index, why in output.failed.items()}
            failed = [_endpoint_failed(rows[index], residents[index], why) for index, why in broken.items()]
            rows = [row for index, row in enumerate(rows) if index not in broken]
            residents = [resident for index, resident in enumerate(residents) if index not in broken]
        done, unusable = self._finish(rows, residents, output)
        failed += unusable
        return StepDone(step.id, done, failed, started, time.monotonic(), forward_s, sum(shares), cached)

    def _finish(
        self, rows: list[Row], residents: list[Resident], output: StepOutput
    ) -> tuple[list[RowDone], list[RowFailed]]:
        """Sample and route the rows whose extension is complete; ``output`` holds their wanted positions."""
        logits, hidden, known = output.logits.float(), output.hidden, output.known
        done, complete, failed = [], [], []
        for row, resident in zip(rows, residents, strict=True):
            if resident.pending:
                done.append(RowDone(row.handle, row.epoch, resident.fed, -1))
            else:
                complete.append((row, resident))
        wanted = [resident.check + 1 for _, resident in complete]
        if sum(wanted) != len(logits):
            raise EngineError(f"the engine returned {len(logits)} rows of logits instead of {sum(wanted)}")
        highest, best = peaks(logits, self._hello.vocab_limit)
        if unusable := unusable_rows(logits, self._hello.vocab_limit, highest):
            starts = list(accumulate(wanted, initial=0))
            spans = [range(start, start + count) for start, count in zip(starts, wanted, strict=False)]
            bad = {index for index, span in enumerate(spans) if not unusable.isdisjoint(span)}
            failed = [self._non_finite(*complete[index]) for index in sorted(bad)]
            kept = [row for index, span in enumerate(spans) if index not in bad for row in span]
            complete = [pair for index, pair in enumerate(complete) if index not in bad]
            logits, hidden, best = logits[kept], hidden[kept], [best[row] for row in kept]
            known = None if known is None else known[kept]
        if not complete:
            return done, failed
        if any(resident.check for _, resident in complete):
            kept = self._check([resident for _, resident in complete], logits, best)
            logits, hidden, best = logits[kept], hidden[kept], [best[row] for row in kept]
        draws = [resident.draw for _, resident in complete]
        if known is not None:
            draws = [draw.among(count) for draw, count in zip(draws, known.tolist(), strict=True)]
        sampled = self._sampler(logits, draws, best)
        decided = self._decide(complete, [token for token, _, _ in sampled], logits, hidden)
        for (row, resident), (token, logprob, top), decision in zip(complete, sampled, decided, strict=True):
            if isinstance(decision, RouteFailed):
                failed.append(_route_failed(row, resident, decision))
                continue
            done.append(
                RowDone(
                    row.handle,
                    row.epoch,
                    resident.fed,
                    token,
                    decision.rule,
                    decision.destination,
                    logprob,
                    tuple([(other.id, other.logprob) for other in top]),
                    tuple(resident.state),
                )
            )
        return done, failed

    def _decide(
        self,
        rows: list[tuple[Row, Resident]],
        tokens: list[int],
        logits: torch.Tensor,
        hidden: torch.Tensor,
    ) -> list[Decision | RouteFailed]:
        """Where each row goes.  A route that fails is asked again for each alone: its neighbours go on."""
        try:
            return [*self._route(rows, tokens, logits, hidden)]
        except RouteFailed as error:
            if len(rows) == 1:
                return [error]
        each = [slice(index, index + 1) for index in range(len(rows))]
        return [self._decide(rows[one], tokens[one], logits[one], hidden[one])[0] for one in each]

    def _check(self, residents: list[Resident], logits: torch.Tensor, best: list[int]) -> list[int]:
        """Keep each resident's checked tokens up to the first that this model would not have written.

        Returns the row of ``logits`` that follows the last token kept, for each resident.
        """
        rows, start = [], 0
        for resident in residents:
            checked = resident.tokens[len(resident.tokens) - resident.check :]
            base = len(resident.tokens) - resident.check
            draws = [resident.draw.at(base + index) for index in range(len(checked))]
            span = slice(start, start + len(checked))
            own = self._sampler(logits[span], draws, best[span]) if checked else []
            kept = next(
                (i for i, (token, mine) in enumerate(zip(checked, own, strict=True)) if token != mine.token),
                len(checked),
            )
            rows.append(start + kept)
            start += len(checked) + 1
            self._residents.keep(resident, base + kept)
            resident.check = 0
        return rows

    def _non_finite(self, row: Row, resident: Resident) -> RowFailed:
        position = resident.fed - resident.settings.prompt_tokens
        return RowFailed(
            row.handle,
            row.epoch,
            resident.fed,
            NonFiniteLogits.__name__,
            f"model {self._hello.model!r} gave NaN or infinite logits at output position {position}; "
            "check its weights and dtype",
        )

    def _score(self, message: Score) -> Scored:
        try:
            scores = self.engine.score(message.tokens, message.top)
        except EngineError as error:
            return Scored(message.id, [], [], str(error))
        top = [
            list(zip(ids, values, strict=True))
            for ids, values in zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
        ]
        return Scored(message.id, scores.logprobs.tolist(), top)


def _extend(resident: Resident, share: int) -> Extend:
    """Feed ``share`` of the pending tokens; logits are wanted at the end, and before each token to check."""
    end = resident.fed + share
    tokens = resident.tokens[resident.fed : end]
    resident.fed = end
    if resident.pending:
        return Extend(resident.slot, tokens, "none")
    return Extend(resident.slot, tokens, "last" if not resident.check else "all")


def _endpoint_failed(row: Row, resident: Resident, why: str) -> RowFailed:
    text = f"{why} (at output position {resident.position})"
    return RowFailed(row.handle, row.epoch, resident.fed, EndpointFailed.__name__, text)


def _route_failed(row: Row, resident: Resident, error: RouteFailed) -> RowFailed:
    text = f"{error} (at output position {resident.position})"
    return RowFailed(row.handle, row.epoch, resident.fed, type(error).__name__, text)
