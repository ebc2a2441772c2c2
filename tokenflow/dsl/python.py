"""The Python front end: a recipe file that is imported, and a :class:`Recipe` checked and compiled.

A recipe written in Python becomes a mapping, as one in YAML is, and goes through the same checks.  What is
checked here is the rest: functions and classes, which workers import by file and name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from tokenflow.dsl.check import name_fault
from tokenflow.dsl.definitions import class_fault, function_fault
from tokenflow.dsl.expr import parse_expression
from tokenflow.dsl.ir import Expr, PythonIR, RecipeIR
from tokenflow.dsl.load import compile_document
from tokenflow.dsl.recipe import Definition, Model, Place, Recipe, Role
from tokenflow.dsl.scan import ExpressionError
from tokenflow.dsl.source import Document, Spot, no_such_file, read_mapping
from tokenflow.dsl.wording import did_you_mean, printable, show
from tokenflow.errors import Problem, RecipeError
from tokenflow.wire.code import ImportFailed, import_file, importing


def load_python(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RecipeIR:
    """Import a recipe file and compile what it calls ``recipe``.

    :raises RecipeError: if the file cannot be imported or has no recipe, or with every problem of it.
    """
    name = os.fspath(path)
    if not Path(name).exists():
        raise no_such_file(name)
    try:
        module = import_file(name)
    except ImportFailed as error:
        raise RecipeError([Problem(name, error.line, error.column, "", printable(error.message))]) from error
    recipe = vars(module).get("recipe")
    if isinstance(recipe, Recipe):
        return recipe.compile(name, overrides)
    message = 'no recipe in the file: it needs recipe = Recipe("...", entry="...") at its top level'
    if recipe is not None:
        message = f'"recipe" must be a tokenflow.Recipe, got {show(recipe)}'
    elif others := [key for key, value in vars(module).items() if isinstance(value, Recipe)]:
        message = f'the recipe to run must be called "recipe", got {show(others[0])}'
    raise RecipeError([Problem(name, 0, 0, "", message)])


def compile_recipe(recipe: Recipe, source: str, overrides: Sequence[str]) -> RecipeIR:
    """Check all of a recipe and make its frozen form, as :meth:`Recipe.compile` says."""
    if running := importing():
        raise RuntimeError(
            f"{running} runs its recipe while it is imported: put that under "
            'if __name__ == "__main__":, because workers import the file, too'
        )
    origin = _origin(recipe, source)
    document = _document(recipe, origin)
    for model in recipe.models:
        _read_python(document, origin, recipe, model)
    compiled = compile_document(document, overrides, origin.source)
    if [model.name for model in compiled.models] != [model.name for model in recipe.models]:
        message = "a recipe in Python has its own models: override what one has, as in models.<name>.path"
        raise RecipeError([Problem(origin.source or recipe.place.file, 0, 0, "models", message)])
    return compiled


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a recipe was written: its file (resolved), what messages call it, where model paths begin.

    ``text`` is what the file holds, None without one.
    """

    file: str
    source: str
    folders: tuple[Path, ...]
    text: bytes | None = None

    def spot(self, place: Place) -> Spot:
        inside = str(Path(place.file).resolve()) == self.file
        shown = self.source if inside and self.source else place.file
        return Spot(shown, self.folders, place.line, place.column)


def _origin(recipe: Recipe, source: str) -> _Origin:
    written = Path(recipe.place.file)
    if not written.is_file():
        return _Origin("", source, (Path.cwd(),))
    name = source or recipe.place.file
    return _Origin(str(written.resolve()), name, (Path(name).absolute().parent,), _text(written))


def _text(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None  # whoever imports it will say so


def _document(recipe: Recipe, origin: _Origin) -> Document:
    """The recipe as a mapping, and the lines of its parts."""
    models = {model.name: dict(model.config) for model in reversed(recipe.models)}
    names = dict.fromkeys(model.name for model in recipe.models)
    routes = {model.name: model.rule_lists[0] for model in recipe.models if model.rule_lists}
    document = read_mapping(
        {
            **recipe.data,
            "models": {name: models[name] for name in names},
            "routes": {name: rules for name, (rules, _) in routes.items()},
        }
    )
    document.values[()] = origin.spot(recipe.place)
    for model in reversed(recipe.models):
        document.keys["models", model.name] = document.values["models", model.name] = origin.spot(model.place)
    for name, (_, place) in routes.items():
        document.keys["routes", name] = document.values["routes", name] = origin.spot(place)
    return document


def _read_python(document: Document, origin: _Origin, recipe: Recipe, model: Model) -> None:
    """Note the Python of one model in the document, and what is wrong with it."""

    def report(place: Place, message: str, *key: str) -> None:
        document.note(origin.spot(place), ("models", model.name, *key), message)

    first = next(other for other in recipe.models if other.name == model.name)
    if first is not model:
        report(model.place, f"the recipe has this model already, from line {first.place.line}")
        return
    params = document.data.get("params", {})
    names = [name for name in params if isinstance(name, str)] if isinstance(params, Mapping) else []
    routed = model.router is not None or any(definition.role == "route" for definition in model.definitions)
    signals, faults = _read_signals(model, routed, names, _heads_of(recipe))
    for key, message in faults:
        report(model.place, message, "signals", *key)
    functions: dict[Role, Definition] = {}
    for definition in model.definitions:
        role, function, place = definition
        fault = function_fault(function, role, origin.file, [*names, *signals])
        if role in functions:
            fault = f"the model has a {role} already, from line {functions[role].place.line}"
        elif model.router is not None:
            fault = f"the model's class has its own {role}: use functions or a class, not both"
        if fault is not None:
            report(place, fault, role)
        functions.setdefault(role, definition)
    for _, place in model.rule_lists[1:]:
        report(place, "the model has rules already: give them in one list", "rules")
    if "send" in functions and not routed:
        message = 'a send function needs a route function: rules say "keep" or "drop_last" themselves'
        report(functions["send"].place, message, "send")
    others = [other.name for other in recipe.models if other is not model]
    if model.peer is not None and (fault := _peer_fault(model, others)) is not None:
        report(model.place, fault, "peer")
    if model.heads and (fault := _heads_fault(model.heads, routed, _heads_of(recipe))) is not None:
        report(model.place, fault, "heads")
    if model.router is not None and _are_numbers(params):
        values = {name: float(value) for name, value in params.items()}
        peer_idx = next((other.index for other in recipe.models if other.name == model.peer), None)
        if (fault := class_fault(model.router, origin.file, model.index, peer_idx, values)) is not None:
            report(model.place, fault, "router")
    if functions or model.router is not None:
        named = {role: getattr(functions[role].function, "__qualname__", "") for role in functions}
        document.python[model.name] = PythonIR(
            file=origin.file,
            route=named.get("route"),
            send=named.get("send"),
            receive=named.get("receive"),
            router=model.router.__qualname__ if isinstance(model.router, type) else None,
            peer=model.peer,
            heads=tuple(model.heads),
            signals=signals,
            text=origin.text,
        )


def _read_signals(
    model: Model, routed: bool, params: Collection[str], heads: Collection[str]
) -> tuple[dict[str, Expr], list[tuple[tuple[str, ...], str]]]:
    """The expressions declared with a model that are right, and what is wrong with others, by name."""
    written = model.signals
    if not isinstance(written, Mapping):
        return {}, [((), f"expected a mapping of names to expressions, got {show(written)}")]
    if written and not routed:
        return {}, [((), "only a route in Python reads signals by name; rules say theirs themselves")]
    trees: dict[str, Expr] = {}
    faults: list[tuple[tuple[str, ...], str]] = []
    for name, text in written.items():
        if not isinstance(name, str):
            faults.append(((), f"a name must be text, got {show(name)}"))
        elif not isinstance(text, str):
            faults.append(((name,), f"expected an expression, got {show(text)}"))
        elif name in params:
            faults.append(((name,), f'"{name}" is a parameter: choose another name'))
        elif (fault := name_fault(name)) is not None:
            faults.append(((name,), fault))
        else:
            try:
                trees[name] = parse_expression(text, params, heads)
            except ExpressionError as error:
                faults += [((name,), f"column {at + 1}: {message}") for at, message in error.faults]
    return trees, faults


def _are_numbers(params: object) -> TypeGuard[Mapping[str, float]]:
    """Whether objects can be made with these parameters; what is wrong with them is reported elsewhere."""
    return isinstance(params, Mapping) and all(
        isinstance(name, str) and isinstance(value, int | float) and abs(value) < 1e38
        for name, value in params.items()
    )


def _peer_fault(model: Model, others: Collection[str]) -> str | None:
    if model.router is None:
        return "only a class has a peer: give one with router=..."
    if model.peer in others:
        return None
    hint = did_you_mean(str(model.peer), others) or f" (other models: {', '.join(others) or 'none'})"
    return f"expected the name of another model, got {show(model.peer)}{hint}"


def _heads_of(recipe: Recipe) -> list[str]:
    declared = recipe.data.get("heads")
    return list(declared) if isinstance(declared, Mapping) else []


def _heads_fault(heads: Sequence[str], routed: bool, known: Collection[str]) -> str | None:
    if isinstance(heads, str):
        return f"expected a list of names, got {show(heads)}: give heads=[{show(heads)}]"
    if not routed:
        return "only a route in Python says which heads it reads; rules name theirs where they use them"
    for name in heads:
        if name not in known:
            hint = did_you_mean(str(name), known) or f" (heads: {', '.join(known) or 'none'})"
            return f"unknown head {show(name)}{hint}"
    return None
