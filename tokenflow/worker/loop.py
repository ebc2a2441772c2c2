"""The one loop of a worker process: receive a step, run the engine, sample, route, reply.

It holds nothing that the router cannot rebuild, and it never blocks on anything but its channel and its
device.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import socket
import time
import traceback
from pathlib import Path

import torch

from tokenflow.engines.base import Engine, Extend
from tokenflow.engines.load import load_engine
from tokenflow.engines.sampling import Sampler, unusable_rows
from tokenflow.errors import EngineError, NonFiniteLogits, ProtocolError, TokenflowError
from tokenflow.routing.rules import compile_rules
from tokenflow.routing.signals import Signals
from tokenflow.settings import settings
from tokenflow.wire.channel import WorkerChannel
from tokenflow.wire.messages import (
    VERSION,
    Failure,
    Hello,
    Ready,
    Row,
    RowDone,
    RowFailed,
    Score,
    Scored,
    Step,
    StepDone,
    Stop,
)
from tokenflow.worker.residents import Resident, Residents, plan

_EXIT_FAILURE = 1


def serve(sock: socket.socket) -> int:
    """Load the model the router asks for and run its steps; returns the exit code of the process."""
    logging.basicConfig(level=settings().log_level, format="%(levelname)s %(name)s: %(message)s")
    channel = WorkerChannel(sock)
    try:
        hello = channel.receive()
        if not isinstance(hello, Hello) or hello.version != VERSION:
            raise ProtocolError(f"this worker speaks version {VERSION}; the router opened with {hello!r:.80}")
        started = time.monotonic()
        torch.set_num_threads(hello.config.threads)
        worker = Worker(load_engine(hello.config), hello)
        # What is loaded by now lives as long as the worker; no collection need look at it again.
        gc.freeze()
        channel.send(worker.ready(time.monotonic() - started))
        while not isinstance(message := channel.receive(), Stop):
            channel.send(worker.answer(message))
    except (EOFError, ConnectionError):
        return 0
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, TokenflowError) else "EngineError"
        text = str(error) if isinstance(error, TokenflowError) else f"{type(error).__name__}: {error}"
        channel.send(Failure(kind, text, traceback.format_exc()))
        return _EXIT_FAILURE
    worker.engine.close()
    return 0


class Worker:
    """One model with its residents, its sampler and its compiled route."""

    def __init__(self, engine: Engine, hello: Hello) -> None:
        self.engine = engine
        self._hello = hello
        self._residents = Residents(engine)
        self._sampler = Sampler(hello.code, hello.vocab_limit, hello.eos_token_ids)
        self._route = compile_rules(hello.rules, hello.params)

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

    def answer(self, message: Step | Score | Hello | Stop) -> StepDone | Scored:
        """Do what a message asks; :raises ProtocolError: if it has no place after the handshake."""
        if isinstance(message, Step):
            return self._step(message)
        if isinstance(message, Score):
            return self._score(message)
        raise ProtocolError(f"unexpected {type(message).__name__} after the handshake")

    def _step(self, step: Step) -> StepDone:
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
        extends = []
        for resident, share in zip(residents, shares, strict=True):
            if share:
                end = resident.fed + share
                wanted = end == len(resident.tokens)
                extends.append(
                    Extend(resident.slot, resident.tokens[resident.fed : end], "last" if wanted else "none")
                )
                resident.fed = end
        before = time.monotonic()
        output = self.engine.step(extends)
        forward_s = time.monotonic() - before
        with torch.inference_mode():
            done, failed = self._finish(step.rows, residents, output.logits.float())
        return StepDone(step.id, done, failed, started, time.monotonic(), forward_s, sum(shares), cached)

    def _finish(
        self, rows: list[Row], residents: list[Resident], logits: torch.Tensor
    ) -> tuple[list[RowDone], list[RowFailed]]:
        """Sample and route the rows whose extension is complete; ``logits`` has one row for each of them."""
        done = [
            RowDone(row.handle, row.epoch, resident.fed, -1)
            for row, resident in zip(rows, residents, strict=True)
            if resident.pending
        ]
        complete = [
            (row, resident) for row, resident in zip(rows, residents, strict=True) if not resident.pending
        ]
        if len(complete) != len(logits):
            raise EngineError(
                f"the engine returned {len(logits)} rows of logits for {len(complete)} requests"
            )
        failed = []
        if unusable := set(unusable_rows(logits, self._hello.vocab_limit)):
            failed = [self._non_finite(*complete[index]) for index in unusable]
            kept = [index for index in range(len(complete)) if index not in unusable]
            complete, logits = [complete[index] for index in kept], logits[kept]
        if not complete:
            return done, failed
        sampled = self._sampler(logits, [resident.draw for _, resident in complete])
        fired = self._fire(complete, logits, [token for token, _, _ in sampled])
        for (row, resident), (token, logprob, top), rule in zip(complete, sampled, fired, strict=True):
            destination = self._hello.rules[rule].destination if rule >= 0 else 0
            done.append(
                RowDone(
                    row.handle,
                    row.epoch,
                    resident.fed,
                    token,
                    rule,
                    destination,
                    logprob,
                    [(best.id, best.logprob) for best in top],
                )
            )
        return done, failed

    def _fire(
        self, complete: list[tuple[Row, Resident]], logits: torch.Tensor, tokens: list[int]
    ) -> list[int]:
        """The index of the rule that fires for each row, -1 for none."""
        if not self._hello.rules:
            return [-1] * len(tokens)
        device, needs = logits.device, self._route.signals
        given = [
            (row.run_length + 1, resident.fed - resident.settings.prompt_tokens) for row, resident in complete
        ]
        values = torch.tensor([resident.settings.params for _, resident in complete], device=device)
        signals = Signals(
            logits=logits,
            tokens=torch.tensor(tokens, device=device),
            positions=torch.tensor([at for _, at in given], device=device) if "position" in needs else None,
            run_lengths=torch.tensor([run for run, _ in given], device=device)
            if "run_length" in needs
            else None,
            params={name: values[:, index] for index, name in enumerate(self._hello.params)},
        )
        fired: list[int] = self._route(signals).tolist()
        return fired

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
        scores = self.engine.score(message.tokens, message.top)
        top = [
            list(zip(ids, values, strict=True))
            for ids, values in zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
        ]
        return Scored(message.id, scores.logprobs.tolist(), top)
