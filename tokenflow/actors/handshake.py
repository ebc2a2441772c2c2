"""What a worker is told at its start, and what it must be to fit the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenflow.dsl.assume import destinations
from tokenflow.dsl.ir import ModelIR, PythonIR, RecipeIR
from tokenflow.errors import ModelLoadError
from tokenflow.types import SamplingParams
from tokenflow.wire.messages import (
    VERSION,
    HeadSpec,
    Hello,
    Open,
    PythonSpec,
    Ready,
    RouteRule,
    Row,
    Step,
)


@dataclass(frozen=True, slots=True)
class Handshake:
    """First words with the workers of a recipe.

    :param recipe: the compiled recipe; every model's ``path`` is a local directory.
    :param vocab_limit: ids from here on belong to no token and are never sampled.
    :param eos_token_ids: the union over the recipe's models.
    :param fingerprints: SHA-256 of ``tokenizer.json`` per model, as the router saw it.
    """

    recipe: RecipeIR
    vocab_limit: int
    eos_token_ids: tuple[int, ...]
    fingerprints: Mapping[str, str]

    def hello(self, model: ModelIR) -> Hello:
        """What a worker of ``model`` is told."""
        recipe = self.recipe
        codes = {other.name: other.code for other in recipe.models}
        return Hello(
            version=VERSION,
            model=model.name,
            code=model.code,
            config=model.config,
            rules=tuple(RouteRule(rule.when, codes[rule.to]) for rule in recipe.routes.get(model.name, ())),
            params=tuple(recipe.params),
            vocab_limit=self.vocab_limit,
            eos_token_ids=self.eos_token_ids,
            heads=tuple(
                HeadSpec(
                    head.name,
                    head.kind,
                    head.path,
                    head.threshold,
                    head.dtype,
                    recipe.notes.problem(("heads", head.name), "").where,
                )
                for head in recipe.heads.values()
                if head.model == model.name
            ),
            python=_python_spec(recipe.python.get(model.name), codes),
            models=len(recipe.models),
            destinations=destinations(recipe, model.name) if model.config.engine == "sim" else (),
        )

    def trial(self) -> Step:
        """A step of one token that any worker can run, for handle 0."""
        request = Open(0, 0, 1, 0, SamplingParams(), tuple(self.recipe.params.values()))
        return Step(0, drop=[], open=[request], truncate=[], rows=[Row(0, 0, 0, [0], 0)])

    def check(self, model: str, facts: Ready) -> None:
        """:raises ModelLoadError: if a worker that is ready does not fit."""
        if facts.version != VERSION:
            raise ModelLoadError(
                f"the worker of model {model!r} speaks version {facts.version}, not {VERSION}"
            )
        if facts.vocab_size < self.vocab_limit:
            raise ModelLoadError(
                f"model {model!r} has logits for {facts.vocab_size} ids, fewer than the "
                f"{self.vocab_limit} of the tokenizer"
            )
        if facts.tokenizer != self.fingerprints.get(model, facts.tokenizer):
            raise ModelLoadError(f"the worker of model {model!r} sees another tokenizer.json than the router")


def _python_spec(python: PythonIR | None, codes: Mapping[str, int]) -> PythonSpec | None:
    """What the worker imports of a model's Python; None where rules decide."""
    if python is None or not python.routes:
        return None
    peer = 0 if python.peer is None else codes[python.peer]
    route, router = python.route or "", python.router or ""
    return PythonSpec(python.file, route, router, peer, dict(python.signals), python.text)
