"""A recipe's file that is edited while its router runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.algorithms.toys import toy_recipe
from tokenflow.router import Router
from tokenflow.wire.code import import_file

pytestmark = pytest.mark.anyio

RECIPE = """\
import torch
from tokenflow import Recipe

recipe = Recipe("edited", entry="slm")
slm = recipe.model("slm", "slm")
llm = recipe.model("llm", "llm")

@slm.route
def after(result):
    return torch.where(result.run_length >= 3, llm.index, 0)

@slm.send
def send(req):
    return req.keep()

llm.rules([{"after": 2, "to": "slm", "send": "keep"}])
"""
EDITS = [RECIPE.replace(">= 3", ">= 5").replace("keep()", "drop_last()"), "raise SystemExit\n", None]


@pytest.mark.parametrize("edit", EDITS, ids=["other", "broken", "gone"])
async def test_every_worker_runs_what_the_file_held_when_the_recipe_was_compiled(
    edit: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(RECIPE)
    (tmp_path / "toys").mkdir()
    recipe = toy_recipe(tmp_path / "toys", import_file(str(file)).recipe, slm={"salt": 1}, llm={"salt": 2})

    async def models() -> list[str]:
        return (await router.generate([1, 40, 50], max_tokens=12, ignore_eos=True)).models

    written = (["slm"] * 3 + ["llm"] * 2) * 3
    router = Router(recipe)
    file.unlink() if edit is None else file.write_text(edit)
    async with router:
        assert await models() == written[:12]
        assert router._system is not None
        worker = await router._system.actors[1].supervisor.ready()
        os.kill(worker.pid, signal.SIGKILL)
        await worker.died.wait()
        assert await models() == written[:12]
