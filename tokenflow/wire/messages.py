"""The messages between the router process and a worker process.

The router owns the truth and a worker is a cache: a worker knows a request only as a *handle* that is
opened with settings and then extended by token ids.  A :class:`Step` says what changed and which handles
run; its :class:`StepDone` answers per (handle, epoch, position), never per batch row.  The epoch of a
handle rises with every re-opening, so a late answer is never mistaken for a current one.

Messages hold no cycles, so what comes with every step is left out of garbage collection (``gc=False``).
What repeats per request is positional on the wire, the rest goes by name.  All evolve by four rules: new
fields come last and have a default; a field never changes its type or meaning; tags are never reused;
:data:`VERSION` rises when an old peer would misread a message.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenflow.types import ModelConfig, SamplingParams

VERSION = 3


class RouteRule(msgspec.Struct, frozen=True, array_like=True):
    """One compiled rule: where ``when`` holds, the request goes to ``destination``.

    ``when`` is an expression tree of :mod:`tokenflow.dsl.expr`; ``destination`` is a model code, from 1 in
    recipe order.
    """

    when: Any
    destination: int


class HeadSpec(msgspec.Struct, frozen=True, array_like=True):
    """A router head to load; ``path`` is a local file or directory (the model's own for ``co_llm``).

    ``threshold`` is the recipe's; without one, the checkpoint's counts.  ``dtype`` is what it computes in.
    ``where`` says where the recipe declares it (``r.yaml:7:3``), for errors.
    """

    name: str
    kind: str
    path: str
    threshold: float | None
    dtype: str = "float32"
    where: str = ""


class PythonSpec(msgspec.Struct, frozen=True, array_like=True):
    """A route written in Python: what to import from which file, which holds ``text``.

    ``route`` is a function's qualified name, or ``router`` a class's, whose instances get ``peer`` (a model
    code, 0 for none) as ``peer_idx``; the other is empty.  ``signals`` are expression trees that the route
    reads by name.
    """

    file: str
    route: str
    router: str
    peer: int
    signals: dict[str, Any] = {}
    text: bytes | None = None


class Destination(msgspec.Struct, frozen=True, array_like=True):
    """Where a simulated model's requests go: to model ``code``, called ``name``.

    ``share`` of its steps lead there, or what the request says for the recipe's parameter number ``param``,
    if that is not -1.  ``rule`` is the rule that leads there, -1 where Python decides, and ``keep`` whether
    the sampled token is kept.
    """

    code: int
    name: str
    share: float
    param: int
    rule: int
    keep: bool


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Router to worker, first frame: who you are and what to load.

    ``config.path`` is a local directory by now.  ``code`` is this model's destination code.  ``params``
    names the recipe's parameters in the order in which :class:`Open` sends their values.  Ids from
    ``vocab_limit`` on (logits padded beyond the tokenizer) are never sampled.  ``eos_token_ids`` is the
    union over the recipe's models.  ``heads`` are those that this model's rules read.  A ``python`` route
    takes the place of rules; ``models`` is how many destination codes there are.  ``destinations`` say where
    requests go if the model is simulated.
    """

    version: int
    model: str
    code: int
    config: ModelConfig
    rules: tuple[RouteRule, ...]
    params: tuple[str, ...]
    vocab_limit: int
    eos_token_ids: tuple[int, ...]
    heads: tuple[HeadSpec, ...] = ()
    python: PythonSpec | None = None
    models: int = 1
    destinations: tuple[Destination, ...] = ()


class DeviceShare(msgspec.Struct, frozen=True, array_like=True):
    """What a model takes of a device, in bytes: its ``weights``, and its KV cache per ``token``.

    All models on it together may take ``usable`` bytes, of which ``cache`` for their KV caches.
    """

    device: str
    usable: int
    cache: int
    weights: int
    token: int


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """Worker to router, before it loads anything: what the model takes of each of its devices.

    KV cache beyond ``most_tokens`` is of no use to it.  Without ``shares`` the engine sees to its memory
    itself.
    """

    shares: list[DeviceShare]
    most_tokens: int


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """Router to worker: load, with so many tokens of KV cache, or as many as the engine likes."""

    kv_cache: int | None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Worker to router: the model is loaded; the facts the router's books need.

    ``vocab_size`` is the width of the logits, ``context_length`` and ``kv_capacity`` are in tokens, and
    KV cache is handed out in blocks of ``block_size`` tokens to at most ``max_requests`` handles.
    ``tokenizer`` is the SHA-256 of the ``tokenizer.json`` that the worker sees.
    """

    version: int
    vocab_size: int
    context_length: int
    kv_capacity: int
    block_size: int
    max_requests: int
    tokenizer: str
    device: str
    dtype: str
    load_s: float


class Open(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Make a handle known, or known anew under a higher epoch (its old KV cache is then dropped).

    ``prompt_tokens`` is the length of the prompt: what follows it counts as output for penalties.
    ``seed`` is the request's seed, drawn at admission where it gave none.  ``state`` is what the rules'
    windows and momentums held after this model's last step for the request; empty at its first.
    """

    handle: int
    epoch: int
    prompt_tokens: int
    seed: int
    sampling: SamplingParams
    params: tuple[float, ...]
    state: tuple[float, ...] = ()


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Extend a handle by ``tokens`` (they follow the ``base`` tokens sent before) and run it.

    ``tokens`` is empty when an earlier extension did not fit one step: the worker goes on with the rest.
    ``run_length`` counts the tokens committed by this model since the request came to it.  The last
    ``check`` tokens are tentative: the worker keeps them up to the first that is not its own choice, and
    samples there.  In how many further steps the worker may run the row by itself is ``ahead``.
    """

    handle: int
    epoch: int
    base: int
    tokens: list[int]
    run_length: int
    check: int = 0
    ahead: int = 0


class Step(msgspec.Struct, frozen=True, tag="step", gc=False):
    """Router to worker: one turn of the engine.  Applied in the order drop, open, truncate, rows.

    ``truncate`` holds (handle, length) pairs: forget what follows the first ``length`` tokens.  Where at
    least ``least`` rows stay, and it is told nothing meanwhile, the worker may go on with them by itself; not
    at all where that is 0.
    """

    id: int
    drop: list[int]
    open: list[Open]
    truncate: list[tuple[int, int]]
    rows: list[Row]
    least: int = 0


class RowDone(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What came of one row.

    ``position`` is the number of the handle's tokens in the KV cache now, which is also the index in the
    sequence of the token just sampled.  ``token`` is -1 where the extension is not finished (the chunk
    did not fit the step).  ``rule`` is the index of the rule that fired, or -1: stay.  ``destination`` is
    a model code, 0 to stay.  ``logprob`` and ``top`` are set if the request asked for them.  Where tokens
    were checked, ``position`` may lie before the last of them: the rest is taken back.  ``state`` is what
    the rules' windows and momentums hold now.
    """

    handle: int
    epoch: int
    position: int
    token: int
    rule: int = -1
    destination: int = 0
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    state: tuple[float, ...] = ()


class RowFailed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request failed; ``kind`` is a class name of :mod:`tokenflow.errors`."""

    handle: int
    epoch: int
    position: int
    kind: str
    message: str


class StepDone(msgspec.Struct, frozen=True, tag="done", gc=False):
    """Worker to router: the step's results.

    ``started`` and ``ended`` are the worker's monotonic clock (seconds) when the frame had been decoded
    and when the reply was ready to be encoded; ``forward_s`` is the part spent in the engine.
    ``computed`` counts the tokens fed to the model, ``cached`` those that a prefix cache saved.  ``ahead``
    names the handles that the next step runs, which the worker has begun by itself.
    """

    id: int
    rows: list[RowDone]
    failed: list[RowFailed]
    started: float
    ended: float
    forward_s: float
    computed: int
    cached: int
    ahead: list[int] = []


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Router to worker: the log-probability of each given token after those before it."""

    id: int
    tokens: list[int]
    top: int


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """Worker to router: ``logprobs[i]`` is of ``tokens[i + 1]``; ``top[i]`` the best alternatives there.

    Where the engine failed, ``failure`` says why and the lists are empty.
    """

    id: int
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    failure: str = ""


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Router to worker: after the step that is running, wait for the next one.  It has no answer."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Router to worker: finish and exit."""


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Worker to router: the whole worker failed and exits; ``kind`` is a class name of the error tree."""

    kind: str
    message: str
    traceback: str


ToWorker = Hello | Grant | Step | Score | Hold | Stop
ToRouter = Claim | Ready | StepDone | Scored | Failure
