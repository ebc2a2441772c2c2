"""Prometheus metrics: what every worker's step replies and the router's books say, and what clients got."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenflow.dsl.ir import RecipeIR
from tokenflow.types import Completion, RouterStatus
from tokenflow.wire.messages import Step, StepDone

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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
_HANDOFF_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """The metrics of one server.

    Names are those of vLLM with our prefix; labels are ``model_name`` and, where it is one model, ``actor``.

    :param recipe: whose models are measured.
    :param model_name: what clients call the recipe.
    """

    def __init__(self, recipe: RecipeIR, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self._names = {model.code: model.name for model in recipe.models}
        self._codes = {model.name: model.code for model in recipe.models}
        self._left: dict[int, tuple[str, float]] = {}
        """By handle: the model that a request has just left, and when."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tokenflow:{name}", text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(
                f"tokenflow:{name}", text, ["model_name", *labels], buckets=buckets, registry=self.registry
            )

        self._finished = counter("request_success", "Responses completed.", "finished_reason")
        self._failed = counter("request_failure", "Requests answered with an error.", "code")
        self._rejected = counter("admission_rejections", "Requests refused before they began.", "reason")
        self._aborted = counter("num_aborted_requests", "Requests whose client left.").labels(model_name)
        self._prompt = counter("prompt_tokens", "Tokens of prompts.").labels(model_name)
        self._generated = counter("generation_tokens", "Tokens of responses.").labels(model_name)
        self._dropped = counter("dropped_tokens", "Tokens that were sampled and discarded.").labels(
            model_name
        )
        self._accepted = counter(
            "accepted_draft_tokens", "Tokens of responses that were drafts which another model checked."
        ).labels(model_name)
        self._routed = counter("routed_tokens", "Tokens of responses by the model that wrote them.", "actor")
        self._handoffs = counter("handoffs", "Moves of a request from one model to another.").labels(
            model_name
        )
        self._decisions = counter(
            "route_decisions", "Where a model's routes sent a request after a step.", "route", "choice"
        )
        self._first_token = histogram(
            "time_to_first_token_seconds", "From submission to the first token.", _FIRST_TOKEN_S
        ).labels(model_name)
        self._latency = histogram(
            "e2e_request_latency_seconds", "From submission to the end.", _LATENCY_S
        ).labels(model_name)
        self._queue_time = histogram(
            "request_queue_time_seconds", "From submission to admission.", _LATENCY_S
        ).labels(model_name)
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Between the tokens of a stream, as they are sent.", _TOKEN_S
        ).labels(model_name)
        steps = histogram("step_seconds", "Steps of a worker.", _STEP_S, "actor")
        sizes = histogram("batch_size", "Requests in a step; see batch_threshold.", _ROWS, "actor")
        handoffs = histogram(
            "handoff_seconds", "From the end of a step to the start of the next model's.", _HANDOFF_S, "actor"
        )
        self._steps = {name: steps.labels(model_name, name) for name in self._codes}
        self._sizes = {name: sizes.labels(model_name, name) for name in self._codes}
        self._handoff_s = {name: handoffs.labels(model_name, name) for name in self._codes}
        self._verifying = {model.name for model in recipe.models if model.config.verify}
        self._routes = {
            (model.name, index): f"{model.name}[{index}]" if index >= 0 else model.name
            for model in recipe.models
            for index in range(-1, len(recipe.routes.get(model.name, ())))
        }

    def step(self, model: str, step: Step, done: StepDone) -> None:
        """A worker has run a step; :data:`tokenflow.router.Observer`."""
        for handle in step.drop:
            self._left.pop(handle, None)
        if not done.rows:
            return
        self._steps[model].observe(done.ended - done.started)
        self._sizes[model].observe(len(step.rows))
        if self._left:
            for entered in step.rows:
                left = self._left.pop(entered.handle, None)
                if left is not None and left[0] != model:
                    self._handoff_s[model].observe(max(done.started - left[1], 0.0))
        own, stayed = self._codes[model], 0
        moved: Tally[tuple[int, int]] = Tally()
        for row in done.rows:
            if row.token < 0:
                continue
            if row.destination in (0, own):
                stayed += 1
            else:
                moved[row.rule, row.destination] += 1
                self._left[row.handle] = (model, done.ended)
        if stayed:
            self._decisions.labels(self.model_name, model, model).inc(stayed)
        for (rule, destination), count in moved.items():
            route = self._routes.get((model, rule), model)
            self._decisions.labels(self.model_name, route, self._names[destination]).inc(count)

    def finished(self, completion: Completion) -> None:
        """A response is complete."""
        usage, timing = completion.usage, completion.timing
        self._finished.labels(self.model_name, completion.finish_reason).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._generated.inc(usage.completion_tokens)
        self._dropped.inc(usage.dropped)
        self._handoffs.inc(usage.handoffs)
        for name, count in usage.by_model.items():
            self._routed.labels(self.model_name, name).inc(count)
            if self._verifying and name not in self._verifying:
                self._accepted.inc(count)
        self._first_token.observe(timing.ttft_s)
        self._latency.observe(timing.latency_s)
        self._queue_time.observe(timing.queued_s)

    def failed(self, code: str) -> None:
        """A client was told of an error."""
        self._failed.labels(self.model_name, code).inc()

    def rejected(self, reason: str) -> None:
        """A request was refused before it began."""
        self._rejected.labels(self.model_name, reason).inc()

    def aborted(self) -> None:
        """A client left before it had its answer."""
        self._aborted.inc()

    def streamed(self, seconds: float, tokens: int) -> None:
        """An event of a stream was sent, so long after the one before."""
        self._inter_token.observe(seconds / tokens)

    def expose(self, status: RouterStatus | None) -> bytes:
        """All of it in Prometheus's text format.

        :param status: the router's, if it is running.
        """
        books = CollectorRegistry()
        if status is not None:
            books.register(_Books(self.model_name, status))
        return generate_latest(self.registry) + generate_latest(books)


class _Books(Collector):
    """What the router's books say now."""

    def __init__(self, model_name: str, status: RouterStatus) -> None:
        self._model_name = model_name
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status
        for name, text, value in (
            ("num_requests_running", "Requests on the models.", status.load.running),
            ("num_requests_waiting", "Requests that wait for memory.", status.load.queued),
        ):
            gauge = GaugeMetricFamily(f"tokenflow:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        gauges = (
            ("mailbox_depth", "Requests that are ready for a model.", "waiting"),
            ("batch_threshold", "Ready requests that a model waits for.", "threshold"),
            ("num_requests_pending", "Requests that are away; their KV cache is kept.", "pending"),
        )
        for name, text, field in gauges:
            yield self._per_model(GaugeMetricFamily, name, text, field)
        share = GaugeMetricFamily(
            "tokenflow:kv_cache_usage_perc", "Booked share of the KV cache, 1 is all.", labels=_PER_MODEL
        )
        for model in status.models:
            share.add_metric([self._model_name, model.name], model.kv_used / model.kv_capacity)
        yield share
        counters = (
            ("steps", "Steps of a worker.", "steps"),
            ("computed_tokens", "Tokens fed to a model.", "computed_tokens"),
            ("cached_tokens", "Tokens that the prefix cache saved.", "cached_tokens"),
            ("forward_seconds", "Time in a model's engine.", "forward_s"),
        )
        for name, text, field in counters:
            yield self._per_model(CounterMetricFamily, name, text, field)

    def _per_model(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, field: str
    ) -> Metric:
        family = kind(f"tokenflow:{name}", text, labels=_PER_MODEL)
        for model in self._status.models:
            family.add_metric([self._model_name, model.name], getattr(model, field))
        return family


_PER_MODEL = ["model_name", "actor"]
