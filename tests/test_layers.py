"""The import table of docs/architecture.md, and house rules that a linter cannot know."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tokenflow"
MODULES = {path.relative_to(PACKAGE.parent).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

LEAVES = {"errors", "types", "settings", "random", "numeric", "limits", "endpoints"}
# A part of the package, and the parts that it may import beside itself.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": LEAVES,
    "types": LEAVES,
    "settings": LEAVES,
    "random": LEAVES,
    "numeric": LEAVES,
    "limits": LEAVES,
    "endpoints": LEAVES,
    "wire": LEAVES,
    "planner": LEAVES,
    "dsl": LEAVES | {"wire", "planner"},
    "routing": LEAVES | {"wire"},
    "engines": LEAVES | {"wire"},
    "worker": LEAVES | {"wire", "routing", "engines"},
    "text": LEAVES | {"wire"},
    "hub": LEAVES | {"wire"},
    "actors": LEAVES | {"wire", "planner", "dsl", "eventloop"},
    "delimiters": LEAVES | {"dsl", "text"},
    "members": LEAVES | {"wire", "dsl", "text", "hub", "delimiters"},
    "prompts": LEAVES | {"text"},
    "written": LEAVES,
    "response": LEAVES | {"wire", "text", "actors", "written"},
    "router": LEAVES | {"wire", "planner", "dsl", "text", "hub", "actors", "members", "prompts", "response"},
    "server": LEAVES | {"wire", "dsl", "text", "prompts", "response", "router", "eventloop"},
    "console": LEAVES,
    "rows": LEAVES | {"prompts"},
    "eventloop": LEAVES,
    "chart": LEAVES,
    "calibrate": LEAVES | {"planner", "dsl", "prompts", "router", "rows", "eventloop"},
    "plan": LEAVES | {"planner", "dsl", "chart", "calibrate"},
    "check": LEAVES | {"dsl", "text", "hub", "delimiters"},
    "run": LEAVES | {"dsl", "prompts", "router", "console", "rows", "eventloop"},
    "cli": LEAVES | {"dsl", "router", "server", "console", "check", "run", "plan"},
    "tokenflow": LEAVES | {"dsl", "router"},
}
WORKER_SIDE = {"routing", "engines", "worker"}
HEAVY = {"torch", "transformers", "safetensors"}
PICKLING = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "shelve"}
VAGUE_NAMES = {"utils", "util", "helpers", "common", "misc"}
LONGEST_MODULE = 380


def part_of(module: str) -> str:
    """The part that a dotted name inside the package belongs to: ``tokenflow.dsl.expr`` is in ``dsl``."""
    names = module.split(".")
    return names[1] if len(names) > 1 else names[0]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported anywhere, functions and type-checking blocks included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides where it points"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def violations(path: str, source: str) -> list[str]:
    """What breaks a rule in one module; ``path`` is relative to the repository."""
    names = path.removesuffix(".py").removesuffix("/__init__").split("/")
    part = part_of(".".join(names))
    tree = ast.parse(source)
    found = [f"{path}: the name {name!r} says nothing" for name in names if name in VAGUE_NAMES]
    if source.count("\n") > LONGEST_MODULE:
        found.append(f"{path}: longer than {LONGEST_MODULE} lines")
    if part not in MAY_IMPORT:
        return [*found, f"{path}: {part!r} has no row in the import table"]

    for line, name in imports(tree):
        root = name.split(".")[0]
        if root == "tokenflow":
            target = part_of(name)
            # ``from tokenflow import errors`` names the part in its second form, the package in its first.
            allowed = MAY_IMPORT[part] | {part, "tokenflow"}
            if target in MAY_IMPORT and target not in allowed:
                found.append(f"{path}:{line}: {part} may not import {target}")
        if root in HEAVY and part not in WORKER_SIDE:
            found.append(f"{path}:{line}: {root} belongs to the worker processes")
        if root in PICKLING:
            found.append(f"{path}:{line}: {root} pickles")
        if root == "asyncio" and part in {"dsl", "planner"}:
            found.append(f"{path}:{line}: {part} is plain code without an event loop")
        if name in {"os.environ", "os.getenv", "os.putenv"} and part != "settings":
            found.append(f"{path}:{line}: {name} belongs to settings")
        if name in {"asyncio.create_task", "asyncio.ensure_future"}:
            found.append(f"{path}:{line}: {name} makes a task outside a task group")

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = ast.unparse(node.value), node.attr
            if owner == "os" and name in {"environ", "getenv", "putenv"} and part != "settings":
                found.append(f"{path}:{node.lineno}: os.{name} belongs to settings")
            if name == "ensure_future" or (
                name == "create_task" and owner.endswith(("asyncio", "loop", "loop()"))
            ):
                found.append(f"{path}:{node.lineno}: {owner}.{name} makes a task outside a task group")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            if not safe:
                found.append(f"{path}:{node.lineno}: torch.load unpickles unless weights_only=True")
    return found


@pytest.mark.parametrize("path", MODULES)
def test_every_module_keeps_to_its_layer_and_to_the_house_rules(path: str) -> None:
    assert violations(path, MODULES[path].read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tokenflow/errors.py", "import tokenflow.wire.messages"),
        ("tokenflow/wire/channel.py", "from tokenflow.dsl.ir import RecipeIR"),
        ("tokenflow/wire/channel.py", "from tokenflow import dsl"),
        ("tokenflow/dsl/load.py", "from tokenflow.actors import system"),
        ("tokenflow/dsl/load.py", "import asyncio"),
        ("tokenflow/dsl/load.py", "def f():\n    from torch import nn"),
        ("tokenflow/actors/model.py", "from tokenflow.engines.base import Engine"),
        ("tokenflow/actors/model.py", "from tokenflow.worker.loop import serve"),
        ("tokenflow/actors/model.py", "from tokenflow.routing import signals"),
        ("tokenflow/actors/model.py", "from tokenflow.router import Router"),
        ("tokenflow/actors/model.py", "import asyncio\nasyncio.create_task(x)"),
        ("tokenflow/actors/model.py", "import asyncio\nasyncio.get_running_loop().create_task(x)"),
        ("tokenflow/actors/model.py", "self._loop.create_task(x)"),
        ("tokenflow/actors/model.py", "from asyncio import ensure_future"),
        ("tokenflow/response.py", "from tokenflow.router import Router"),
        ("tokenflow/router.py", "from tokenflow import cli"),
        ("tokenflow/router.py", "import torch.nn.functional as F"),
        ("tokenflow/text.py", "from transformers import AutoTokenizer"),
        ("tokenflow/hub.py", "import safetensors.torch"),
        ("tokenflow/hub.py", "import os\nos.environ['HF_HUB_OFFLINE']"),
        ("tokenflow/hub.py", "from os import environ"),
        ("tokenflow/hub.py", "import os\nos.getenv('HF_TOKEN')"),
        ("tokenflow/worker/loop.py", "from tokenflow.actors.mailbox import Mailbox"),
        ("tokenflow/worker/loop.py", "import pickle"),
        ("tokenflow/worker/loop.py", "from multiprocessing import Process"),
        ("tokenflow/routing/heads.py", "import torch\ntorch.load(path)"),
        ("tokenflow/routing/heads.py", "import torch\ntorch.load(path, weights_only=False)"),
        ("tokenflow/routing/utils.py", ""),
        ("tokenflow/common/text.py", ""),
        ("tokenflow/gateway.py", ""),
        ("tokenflow/router.py", "\n" * (LONGEST_MODULE + 1)),
    ],
)
def test_a_broken_rule_is_found(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tokenflow/settings.py", "import os\nos.environ['HF_HUB_OFFLINE']"),
        ("tokenflow/worker/loop.py", "import torch\nfrom tokenflow.engines.base import Engine"),
        ("tokenflow/routing/heads.py", "import torch\ntorch.load(path, weights_only=True)"),
        (
            "tokenflow/actors/model.py",
            "import asyncio\nfrom tokenflow.wire import messages\ngroup.create_task(x)",
        ),
        (
            "tokenflow/router.py",
            "from tokenflow import dsl, errors\nfrom tokenflow.actors.system import ActorSystem",
        ),
    ],
)
def test_what_the_rules_allow_is_not_reported(path: str, source: str) -> None:
    assert violations(path, source) == []
