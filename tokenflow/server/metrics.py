"""Prometheus metrics: what workers' step replies and the router's books say, and what clients got."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenflow.dsl.ir import RecipeIR
from tokenflow.server.histogram import Histogram
from tokenflow.types import Completion, ModelStatus, RouterStatus
from tokenflow.wire.messages import Step, StepDone

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "tokenflow:"
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
    160, 640, 2560,
)  # fmt: skip
_LATENCY_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5,
    10, 20, 40,
)  # fmt: skip
_STEP_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_HANDOFF_S = (0.0001, *_STEP_S)
_DELAY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(slots=True)
class ModelMetrics:
    """What is measured of one model."""

    step_s: Histogram = field(default_factory=lambda: Histogram(_STEP_S))
    rows: Histogram = field(default_factory=lambda: Histogram(_ROWS))
    handoff_s: Histogram = field(default_factory=lambda: Histogram(_HANDOFF_S))


class Metrics(Collector):
    """The metrics of one server.

    Names are those of vLLM with our prefix; labels are ``model_name`` and, where it is one model, ``actor``.

    :param recipe: whose models are measured.
    :param model_name: what clients call the recipe.
    """

    def __init__(self, recipe: RecipeIR, model_name: str) -> None:
        self._model_name = model_name
        self._names = {model.code: model.name for model in recipe.models}
        self._verifying = {model.name for model in recipe.models if model.config.verify}
        self._models = {model.name: ModelMetrics() for model in recipe.models}
        self._left: dict[int, tuple[str, float]] = {}
        """By handle: the model that a request has just left, and when."""
        self._decisions: Tally[tuple[str, int, int]] = Tally()
        """By model, index of the rule that fired, and destination code; a rule of -1 is none."""
        self._finished: Tally[str] = Tally()
        self._failed: Tally[str] = Tally()
        self._rejected: Tally[str] = Tally()
        self._routed: Tally[str] = Tally()
        self._sums: Tally[str] = Tally()
        self._first_token_s = Histogram(_FIRST_TOKEN_S)
        self._latency_s = Histogram(_LATENCY_S)
        self._queue_s = Histogram(_LATENCY_S)
        self._token_s = Histogram(_TOKEN_S)
        self._delay_s = Histogram(_DELAY_S)
        self._status: RouterStatus | None = None

    def step(self, model: str, step: Step, done: StepDone) -> None:
        """A worker has run a step; :data:`tokenflow.router.Observer`."""
        for handle in step.drop:
            self._left.pop(handle, None)
        if not done.rows:
            return
        own = self._models[model]
        own.step_s.add(done.ended - done.started)
        own.rows.add(len(step.rows))
        if self._left:
            for entered in step.rows:
                left = self._left.pop(entered.handle, None)
                if left is not None and left[0] != model:
                    own.handoff_s.add(max(done.started - left[1], 0.0))
        for row in done.rows:
            if row.token >= 0:
                self._decisions[model, row.rule, row.destination] += 1
                if row.destination:
                    self._left[row.handle] = model, done.ended

    def finished(self, completion: Completion) -> None:
        """A response is complete."""
        usage, timing = completion.usage, completion.timing
        self._finished[completion.finish_reason] += 1
        self._routed.update(usage.by_model)
        self._sums.update(
            prompt_tokens=usage.prompt_tokens,
            generation_tokens=usage.completion_tokens,
            dropped_tokens=usage.dropped,
            handoffs=usage.handoffs,
        )
        if self._verifying:
            drafts = (count for name, count in usage.by_model.items() if name not in self._verifying)
            self._sums["accepted_draft_tokens"] += sum(drafts)
        self._first_token_s.add(timing.ttft_s)
        self._latency_s.add(timing.latency_s)
        self._queue_s.add(timing.queued_s)

    def scored(self, responses: int, prompt_tokens: int) -> None:
        """Responses that are a prompt and nothing more are complete; each counts it, as others do."""
        self._finished["length"] += responses
        self._sums["prompt_tokens"] += responses * prompt_tokens

    def failed(self, code: str) -> None:
        """A client was told of an error."""
        self._failed[code] += 1

    def rejected(self, reason: str) -> None:
        """A request was refused before it began."""
        self._rejected[reason] += 1

    def aborted(self) -> None:
        """A client left before it had its answer."""
        self._sums["num_aborted_requests"] += 1

    def streamed(self, seconds: float, tokens: int) -> None:
        """An event of a stream was sent, so long after the one before."""
        self._token_s.add(seconds / tokens)

    def delayed(self, seconds: float) -> None:
        """The event loop was late."""
        self._delay_s.add(seconds)

    def expose(self, status: RouterStatus | None) -> bytes:
        """All of it in Prometheus's text format.

        :param status: the router's, if it is running.
        """
        self._status = status
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Part of :class:`prometheus_client.registry.Collector`."""
        yield from self._counters()
        yield from self._histograms()
        if self._status is not None:
            yield from self._books(self._status)

    def _counters(self) -> Iterator[Metric]:
        for name, text in _SUMS.items():
            yield self._counter(name, text, {(): self._sums[name]})
        yield self._counter("request_success", "Responses completed.", _by(self._finished), "finished_reason")
        yield self._counter("request_failure", "Errors that clients were told of.", _by(self._failed), "code")
        yield self._counter(
            "admission_rejections", "Requests refused before they began.", _by(self._rejected), "reason"
        )
        yield self._counter(
            "routed_tokens", "Tokens of responses by their writer.", _by(self._routed), "actor"
        )
        decisions: Tally[tuple[str, ...]] = Tally()
        for (model, rule, destination), count in self._decisions.items():
            route = f"{model}[{rule}]" if rule >= 0 else model
            decisions[route, self._names.get(destination, model)] += count
        yield self._counter(
            "route_decisions", "Where requests were sent after a step.", decisions, "route", "choice"
        )

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From submission to the first token.", self._first_token_s),
            ("e2e_request_latency_seconds", "From submission to the end.", self._latency_s),
            ("request_queue_time_seconds", "From submission to admission.", self._queue_s),
            (
                "inter_token_latency_seconds",
                "Between the tokens of a stream, as they are sent.",
                self._token_s,
            ),
            ("event_loop_delay_seconds", "How late the event loop of the server was.", self._delay_s),
        ):
            family = HistogramMetricFamily(_PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._model_name], histogram.buckets(), histogram.total)
            yield family
        for name, text, key in (
            ("step_seconds", "Steps of a worker.", "step_s"),
            ("batch_size", "Requests in a step; see batch_threshold.", "rows"),
            ("handoff_seconds", "From the end of a step to the start of the next model's.", "handoff_s"),
        ):
            family = HistogramMetricFamily(_PREFIX + name, text, labels=["model_name", "actor"])
            for model, own in self._models.items():
                histogram = getattr(own, key)
                family.add_metric([self._model_name, model], histogram.buckets(), histogram.total)
            yield family

    def _books(self, status: RouterStatus) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests on the models.", status.load.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for memory.", status.load.queued)
        for name, text, attribute in (
            ("mailbox_depth", "Requests that are ready for a model.", "waiting"),
            ("batch_threshold", "Ready requests that a model waits for.", "threshold"),
            ("num_requests_pending", "Requests that are away; their KV cache is kept.", "pending"),
        ):
            yield self._gauge(name, text, _of(status.models, attribute))
        use = _by({model.name: model.kv_used / model.kv_capacity for model in status.models})
        yield self._gauge("kv_cache_usage_perc", "Booked share of the KV cache; 1 is all.", use)
        for name, text, attribute in (
            ("worker_restarts", "Workers that were replaced.", "restarts"),
            ("steps", "Steps of a worker.", "steps"),
            ("computed_tokens", "Tokens fed to a model.", "computed_tokens"),
            ("cached_tokens", "Tokens that the prefix cache saved.", "cached_tokens"),
            ("forward_seconds", "Time in a model's engine.", "forward_s"),
        ):
            yield self._counter(name, text, _of(status.models, attribute), "actor")

    def _counter(
        self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(_PREFIX + name, text, labels=["model_name", *labels])
        for key, value in values.items():
            family.add_metric([self._model_name, *key], value)
        return family

    def _gauge(
        self, name: str, text: str, values: float | Mapping[tuple[str, ...], float]
    ) -> GaugeMetricFamily:
        """A gauge of the router, or of each model."""
        if not isinstance(values, Mapping):
            family = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._model_name], values)
            return family
        family = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name", "actor"])
        for key, value in values.items():
            family.add_metric([self._model_name, *key], value)
        return family


_SUMS = {
    "prompt_tokens": "Tokens of prompts, for each response to them.",
    "generation_tokens": "Tokens of responses.",
    "dropped_tokens": "Tokens that were sampled and discarded.",
    "accepted_draft_tokens": "Tokens of responses that were drafts which another model checked.",
    "handoffs": "Moves of a request from one model to another.",
    "num_aborted_requests": "Requests whose client left.",
}


def _by(tally: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(key,): count for key, count in tally.items()}


def _of(models: Iterable[ModelStatus], attribute: str) -> dict[tuple[str, ...], float]:
    return {(model.name,): getattr(model, attribute) for model in models}
