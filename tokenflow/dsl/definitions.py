"""What functions and classes of a recipe must be, so that workers can import and call them.

Each check answers with what is wrong, and what to do, or None.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Any

from tokenflow.dsl.base import CODES, BaseRouter
from tokenflow.dsl.recipe import Role
from tokenflow.dsl.wording import did_you_mean, show
from tokenflow.wire.code import failure

_ARGUMENTS: Mapping[Role, tuple[str, ...]] = {
    "route": ("result",),
    "send": ("req",),
    "receive": ("peer_req", "req"),
}
_METHODS: Mapping[Role, tuple[str, ...]] = {**_ARGUMENTS, "receive": ("peer_req",)}


def function_fault(function: object, role: Role, file: str, names: Collection[str]) -> str | None:
    """What is wrong with a decorated function of a recipe in ``file`` (resolved).

    :param names: what a route may ask for: the recipe's parameters, and the signals of its model.
    """
    if inspect.isclass(function):
        return "a class is given to its model with recipe.model(..., router=...)"
    if not callable(function) or not hasattr(function, "__qualname__") or inspect.ismethod(function):
        return f"expected a function, got {show(function)}"
    fault = _import_fault(function, file) or _call_fault(function)
    if fault is not None:
        return fault
    if role == "route":
        return _route_fault(function, names)
    return _signature_fault(function, getattr(function, "__name__", role), _ARGUMENTS[role])


def class_fault(
    router: object, file: str, index: int, peer_idx: int | None, params: Mapping[str, float]
) -> str | None:
    """What is wrong with a model's class of a recipe in ``file`` (resolved)."""
    if not (inspect.isclass(router) and issubclass(router, BaseRouter)):
        got = f'the class "{router.__name__}"' if inspect.isclass(router) else show(router)
        return f"expected a subclass of tokenflow.BaseRouter, got {got}"
    if (fault := _import_fault(router, file)) is not None:
        return fault
    name = router.__name__
    if router.route is BaseRouter.route:
        return f'"{name}" has no method route(self, result)'
    for param in params:
        own = inspect.getattr_static(router, param, None)
        if param in CODES or hasattr(BaseRouter, param) or callable(own) or isinstance(own, property):
            return f'the parameter "{param}" would hide what "{name}" has under this name: rename one of them'
    try:
        made = router.build(index=index, peer_idx=peer_idx, params=params)
    except Exception as error:
        return f'"{name}" cannot be made: it {failure(error, file)}'
    for role, arguments in _METHODS.items():
        method = getattr(made, role)
        fault = _call_fault(method) or _signature_fault(method, role, arguments, own="self, ")
        if fault is not None:
            return f'"{name}.{role}" {fault}'
    return None


def _import_fault(definition: Any, file: str) -> str | None:
    """Why a worker could not import a definition by the recipe's file and its qualified name."""
    name: str = definition.__qualname__
    if "<lambda>" in name:
        return 'a lambda has no name for workers to import: write a "def" at the top level of the file'
    if "<locals>" in name:
        return (
            f'"{name.rpartition(".")[2]}" is defined inside a function, where workers cannot import it: move '
            "it to the top level of the file; a value from around it can be a parameter of the recipe"
        )
    module = sys.modules.get(definition.__module__)
    home = getattr(module, "__file__", None)
    if home is None or not Path(home).is_file():
        return (
            f'"{name}" is defined in no file (at a prompt, in a notebook, on stdin): save the recipe in a '
            ".py file, from which workers import it"
        )
    if str(Path(home).resolve()) != file:
        return (
            f'"{name}" is defined in {home}, not in the recipe\'s own file: define it here; it may call, '
            "or derive from, what it imports"
        )
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not definition:
        return (
            f'"{name}" means something else at the end of the file: give everything its own name, and put '
            "the model's decorator above all others"
        )
    return None


def _call_fault(function: Callable[..., Any]) -> str | None:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return "must be a plain function, neither async nor a generator"
    if inspect.isasyncgenfunction(function):
        return "must be a plain function, neither async nor a generator"
    return None


def _signature_fault(
    function: Callable[..., Any], name: str, arguments: tuple[str, ...], own: str = ""
) -> str | None:
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return f"must be called as it is: def {name}({own}{', '.join(arguments)})"
    return None


def _route_fault(function: Callable[..., Any], names: Collection[str]) -> str | None:
    try:
        first, *rest = inspect.signature(function).parameters.values()
    except ValueError:
        return "must take the step's result: def route(result)"
    if first.kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD):
        return f"must take the step's result first, got {first}"
    for parameter in rest:
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
            return f'takes "{parameter}" by position, but parameters are passed by name'
        if parameter.kind is not Parameter.VAR_KEYWORD and parameter.name not in names:
            known = ", ".join(names) or "none"
            hint = did_you_mean(parameter.name, names) or f" (known: {known})"
            what = "neither a parameter of the recipe nor a signal of the model"
            return f'takes "{parameter.name}", which is {what}{hint}'
    return None
