"""Values that every layer speaks of: sampling settings, tokens, completions.  Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tokenflow.errors import InvalidRequest
from tokenflow.numeric import is_integer, is_number

FinishReason = Literal["stop", "length"]

MAX_TOP_LOGPROBS = 20
MAX_PARAM = 3.4e38
"""What a recipe's numbers may be at most: workers compute with them in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a response ends; one meaning for every model of a recipe.

    :param max_tokens: most output tokens; ``None`` means as many as the context allows.
    :param temperature: 0 is greedy.
    :param top_k: keep the k most probable tokens; 0 and -1 keep all, 1 is greedy.
    :param top_p: keep the smallest set of most probable tokens whose mass reaches ``top_p``; in [0, 1],
        where 0 is greedy.
    :param min_p: drop tokens less probable than ``min_p`` times the most probable one; in [0, 1].
    :param seed: a 64-bit seed; ``None`` draws one at admission, which the request then keeps.
    :param choice: index of this response among several to one prompt; part of the random key.
    :param repetition_penalty: > 0; divides positive and multiplies negative logits of every token seen in
        the prompt or the output.
    :param presence_penalty: subtracted from the logit of every token in the output; in [-2, 2].
    :param frequency_penalty: subtracted once per occurrence in the output; in [-2, 2].
    :param logit_bias: token id to a number added to its logit; at most 1,024.
    :param min_tokens: no end-of-sequence or stop token before this many output tokens; a stop string that
        one of them completes does not end the response, and belongs to its text.
    :param stop: strings that end the response; never part of its text.  At most 64, of at most 1,000
        characters: each costs something with every token.
    :param stop_token_ids: ids that end the response, beside the models' own end-of-sequence ids; at most
        1,024.
    :param ignore_eos: do not end at the models' end-of-sequence ids.
    :param logprobs: report each token's log-probability under the distribution it was drawn from (after
        penalties, bias, temperature and truncation; for greedy at temperature 1 without truncation).
    :param top_logprobs: report this many alternatives per token as well; at most 20.
    :param skip_special_tokens: leave special tokens out of the text.
    :raises InvalidRequest: for a value out of range; ``param`` names the field.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    choice: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def require(ok: bool, param: str, rule: str) -> None:
            if not ok:
                raise InvalidRequest(f"{param} must be {rule}, got {getattr(self, param)!r}", param)

        for name, most in _MOST.items():
            value = getattr(self, name)
            if isinstance(value, tuple | Mapping) and len(value) > most:
                raise InvalidRequest(f"{name} can have {most} entries at most, got {len(value)}", name)
        for name in _NUMBERS:
            require(is_number(getattr(self, name)), name, "a finite number")
        for name in ("top_k", "choice", "min_tokens", "top_logprobs"):
            require(is_integer(getattr(self, name)), name, "a 64-bit integer")
        for name in ("ignore_eos", "logprobs", "skip_special_tokens"):
            require(isinstance(getattr(self, name), bool), name, "true or false")
        require(
            self.max_tokens is None or (is_integer(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            "a 64-bit integer of at least 1",
        )
        require(self.temperature >= 0, "temperature", "at least 0")
        require(self.top_k >= -1, "top_k", "at least 1, or 0 or -1 to keep every token")
        require(0 <= self.top_p <= 1, "top_p", "between 0 and 1")
        require(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        require(
            self.seed is None or is_integer(self.seed, below=2**64),
            "seed",
            "a 64-bit integer",
        )
        require(self.choice >= 0, "choice", "at least 0")
        require(self.repetition_penalty > 0, "repetition_penalty", "greater than 0")
        for name in ("presence_penalty", "frequency_penalty"):
            require(-2 <= getattr(self, name) <= 2, name, "between -2 and 2")
        require(
            isinstance(self.logit_bias, Mapping)
            and all(is_integer(k) and k >= 0 and is_number(v) for k, v in self.logit_bias.items()),
            "logit_bias",
            "a mapping of token ids to finite numbers",
        )
        require(self.min_tokens >= 0, "min_tokens", "at least 0")
        require(
            isinstance(self.stop, tuple) and all(isinstance(s, str) and _is_text(s) for s in self.stop),
            "stop",
            "texts of at least one character each, without lone surrogates",
        )
        longest = max(map(len, self.stop), default=0)
        if longest > _LONGEST_STOP:
            raise InvalidRequest(
                f"stop can have texts of {_LONGEST_STOP} characters at most, got one of {longest}", "stop"
            )
        require(
            isinstance(self.stop_token_ids, tuple)
            and all(is_integer(t) and t >= 0 for t in self.stop_token_ids),
            "stop_token_ids",
            "a tuple of token ids",
        )
        require(
            0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
            "top_logprobs",
            f"between 0 and {MAX_TOP_LOGPROBS}",
        )
        # Workers get what was checked: plain numbers, and a mapping that nobody else holds.
        for name in _NUMBERS:
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "logit_bias", {k: float(v) for k, v in self.logit_bias.items()})

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0


_LONGEST_STOP = 1_000
_MOST = {"stop": 64, "stop_token_ids": 1_024, "logit_bias": 1_024}
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _is_text(value: str) -> bool:
    """Whether a string is not empty and can be encoded: half a surrogate pair cannot."""
    try:
        return bool(value.encode())
    except UnicodeEncodeError:
        return False


class Logprob(NamedTuple):
    """A token id with its natural-log probability."""

    id: int
    logprob: float


class Token(NamedTuple):
    """One committed token.

    ``text`` is what it adds to the response (empty while a character or a possible stop string is still
    incomplete); ``model`` is the member of the recipe that wrote it.
    """

    id: int
    text: str
    model: str
    logprob: float | None = None
    top_logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.  Only committed tokens are completion tokens."""

    prompt_tokens: int
    completion_tokens: int
    by_model: Mapping[str, int]
    handoffs: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from submission to admission (the wait for memory), the first committed token and the end."""

    ttft_s: float
    latency_s: float
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished response.

    ``simulated`` says that a model that may have written to it was simulated: its text means nothing, and its
    timing is that of the recipe.  ``stop_reason`` is the stop string or the stop token id of the request that
    ended the response; none if a model's end-of-sequence id or the length did.
    """

    text: str
    tokens: Sequence[Token]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    seed: int
    simulated: bool = False
    stop_reason: int | str | None = None

    @property
    def token_ids(self) -> list[int]:
        """Ids of the committed tokens, the end-of-sequence token included."""
        return [token.id for token in self.tokens]

    @property
    def models(self) -> list[str]:
        """The member that wrote each token: the routing trace."""
        return [token.model for token in self.tokens]


class StreamEvent(NamedTuple):
    """What a response gained since the last event; the last one carries the completion."""

    text: str
    tokens: tuple[Token, ...]
    completion: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """Where a model runs that is reached over HTTP (``openai`` engine); ``models.<name>.endpoint``.

    :param base_url: of the OpenAI-compatible interface, up to ``/v1``.
    :param model_id: the model's name there; empty takes the first that the endpoint lists.
    :param api_key_env: environment variable that holds the key; empty sends none.
    :param top_logprobs: most probable tokens that are asked for at each position; 0 for an endpoint that
        reports none.
    :param span: tokens asked for in one call; those after a hand-off are thrown away.
    :param concurrency: most calls that are open at once; a step of more requests asks for each token anew.
    :param timeout_s: longest wait for an answer, and for each next piece of it.
    :param retries: further attempts after an error that may pass, with growing pauses.
    """

    base_url: str
    model_id: str = ""
    api_key_env: str = ""
    top_logprobs: int = 20
    span: int = 8
    concurrency: int = 16
    timeout_s: float = 50.0
    retries: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """How one member of a recipe is loaded and run; the keys of ``models.<name>`` in a recipe.

    :param path: a local directory in Hugging Face layout, or a hub id; ``sim`` needs none.
    :param engine: name of the engine that runs it; ``sim`` runs no model and sleeps as long as one would.
    :param dtype: ``auto`` (as stored), ``float32``, ``bfloat16`` or ``float16``.
    :param device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:<n>``.
    :param context_length: most tokens of one request (prompt and output); by default the model's own.
    :param kv_cache: KV cache size in tokens; ``auto`` (``None``) divides what is free of a device between its
        models, so that all hold as many tokens.
    :param max_requests: most requests that hold KV cache at once.
    :param max_batch_tokens: most tokens of one step; longer prefills are cut into chunks.
    :param prefix_cache: reuse the KV cache of earlier requests with the same first tokens.
    :param threads: CPU threads of the worker.
    :param tensor_parallel: devices that share the model (``sglang`` engine).
    :param verify: check tentative tokens: keep those that are this model's own choice, and write the first
        that is not.
    :param endpoint: where the model runs (``openai`` engine); ``path`` then needs its tokenizer files only.
    :param latency_ms: how long a step of ``sim`` takes, in ms: a number, or a table by batch size, linear
        between its entries and constant beyond them.
    :param routing: share of a ``sim`` model's steps after which the request goes to each other model: a
        number or the name of a param.
    :param trace: recorded responses whose routes ``sim`` repeats: a file of ``tokenflow run --output``.
    :param load_timeout: seconds that loading may take.
    :param step_timeout: seconds that one step may take; a worker that takes longer is replaced.
    :param restarts: how often in a row the worker is replaced without having completed a step; after that
        the model is given up.
    """

    path: str = ""
    engine: str = "torch"
    dtype: str = "auto"
    device: str = "auto"
    context_length: int | None = None
    kv_cache: int | None = None
    max_requests: int = 64
    max_batch_tokens: int = 2048
    prefix_cache: bool = True
    threads: int = 1
    tensor_parallel: int = 1
    verify: bool = False
    endpoint: EndpointConfig | None = None
    latency_ms: tuple[tuple[int, float], ...] = ()
    routing: Mapping[str, float | str] = field(default_factory=dict)
    trace: str = ""
    load_timeout: float = 1800.0
    step_timeout: float = 120.0
    restarts: int = 5


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What a model is doing, and what it has done since it started.

    ``condition`` is ``loading``, ``ready``, ``restarting`` or ``down``, and ``restarts`` how often its worker
    was replaced.  ``threshold`` is how many ready requests it waits for, and ``waiting`` how many are ready.
    ``pending`` requests are away at other models; their KV cache is kept.  ``kv_used`` tokens of
    ``kv_capacity`` are booked.  Tokens and seconds are sums over steps: ``committed_tokens`` were written
    here, ``computed_tokens`` fed to the model, and ``cached_tokens`` saved by its prefix cache.
    """

    name: str
    condition: str
    restarts: int
    threshold: int
    waiting: int
    pending: int
    kv_used: int
    kv_capacity: int
    steps: int
    committed_tokens: int
    computed_tokens: int
    cached_tokens: int
    forward_s: float
    step_s: float


class Load(NamedTuple):
    """Requests ``running`` on the models, ``queued`` for memory there, and how many can run at once."""

    running: int
    queued: int
    slots: int


@dataclass(eq=False, slots=True)
class Reservation:
    """Places in the queue for requests that come together.

    :param left: places that no request has taken yet.
    :param tokens: prompt tokens of its requests that wait.
    """

    left: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """What a router is doing; ``longest`` is how many tokens (prompt and output) a request can have."""

    load: Load
    longest: int
    models: tuple[ModelStatus, ...]
