"""Workers that are killed, stopped or cannot load, and routers that are killed."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.scenarios.setup import (
    DEMO,
    RECIPE,
    ROOT,
    Answer,
    Broken,
    Question,
    Steps,
    ask_all,
    demo,
    load,
    quantiles,
    questions,
    require,
    supervisors,
    undisturbed,
)
from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.load import load_recipe
from tokenflow.errors import WorkerDied
from tokenflow.router import Router

GONE_S = 3.0


async def kills(options: argparse.Namespace) -> dict[str, Any]:
    """SIGKILLs of random workers under 32 concurrent requests."""
    asked = questions(64, options.seed)
    expected = await undisturbed(asked)
    with tempfile.TemporaryDirectory() as folder:
        return await killed(demo(Path(folder)), asked, expected, options.kills, options.seed)


async def states(options: argparse.Namespace) -> dict[str, Any]:
    """The same where rules remember: windows, momentums, text boundaries."""
    facts: dict[str, Any] = {}
    asked = questions(64, options.seed)
    for name in ("rolling", "momentum", "step_boundary"):
        source = DEMO / f"{name}.yaml"
        expected = await undisturbed(asked, source)
        with tempfile.TemporaryDirectory() as folder:
            recipe = demo(Path(folder), source=source)
            facts[name] = await killed(recipe, asked, expected, options.kills // 6, options.seed)
    return facts


async def simulated(options: argparse.Namespace) -> dict[str, Any]:
    """The same where models are simulated, in processes of their own."""
    recipe = load_recipe(ROOT / "recipes" / "sim.yaml")
    asked = [Question("Q", {"max_tokens": 40, "seed": number}) for number in range(64)]
    async with Router(recipe) as router:
        expected = await ask_all(router, asked, 32)
    return await killed(recipe, asked, expected, options.kills // 6, options.seed)


async def killed(
    recipe: RecipeIR, asked: Sequence[Question], expected: Sequence[Answer], kills: int, seed: int
) -> dict[str, Any]:
    """Kill workers of a recipe, each a moment after all were ready, while 32 requests run."""
    dice = random.Random(seed)
    known, ready, recovered, steps = [], [], [], Steps()
    async with Router(recipe, observer=steps) as router:
        victims = supervisors(router)
        rss = [psutil.Process().memory_info().rss]
        started = time.monotonic()
        async with load(router, asked, expected, 32) as counts:
            for _ in range(kills):
                await asyncio.sleep(dice.uniform(0.05, 0.5))
                name, victim = dice.choice(sorted(victims.items()))
                worker = await victim.ready()
                moment = time.monotonic()
                os.kill(worker.pid, signal.SIGKILL)
                await worker.died.wait()
                known.append(time.monotonic() - moment)
                await victim.ready()
                ready.append(time.monotonic() - moment)
                recovered.append(await steps.next(name) - moment)
                rss.append(psutil.Process().memory_info().rss)
        seconds = time.monotonic() - started
    require(not counts["lost"] and not counts["wrong"], f"requests were lost or changed: {dict(counts)}")
    return {
        "kills": kills,
        "seconds": round(seconds, 1),
        "answered": counts["answered"],
        "lost": counts["lost"],
        "different": counts["wrong"],
        "until_known": quantiles(known),
        "until_ready": quantiles(ready),
        "until_first_step": quantiles(recovered),
        "router_rss_mib": [round(rss[0] / 2**20), round(rss[-1] / 2**20)],
    }


async def degrade(options: argparse.Namespace) -> dict[str, Any]:
    """The large model is given up: all requests are answered, and later ones by the small model alone."""
    asked = questions(32, options.seed)
    alone = [Question(question.prompt, {**question.sampling, "params": {"tau": 1.0}}) for question in asked]
    expected = await undisturbed(alone)
    lives = [{"die_at": 100}, *[{"die_loading": 1}] * 9]
    with tempfile.TemporaryDirectory() as folder:
        recipe = demo(Path(folder), {"llm": lives}, on_failure="degrade", restarts=2)
        async with Router(recipe) as router:
            during: list[Answer] = []
            async with asyncio.timeout(120):
                while supervisors(router)["llm"].error is None:
                    during += await ask_all(router, asked, 32)
            after = await ask_all(router, asked, 32)
    require(after == expected, "without the large model the small one answers otherwise than alone")
    return {
        "answered_while_it_died": len(during),
        "of_which_without_the_large_model": sum("llm" not in answer.models for answer in during),
        "answered_after": len(after),
        "after_as_the_small_model_alone": True,
    }


async def stops(options: argparse.Namespace) -> dict[str, Any]:
    """SIGSTOP of each worker under load: it is found, dumped and replaced."""
    asked = questions(64, options.seed)
    expected = await undisturbed(asked)
    found, limit, steps = [], 2.0, Steps()
    with tempfile.TemporaryDirectory() as folder:
        recipe = demo(Path(folder), step_timeout=limit)
        async with Router(recipe, observer=steps) as router, load(router, asked, expected, 32) as counts:
            for name, victim in list(supervisors(router).items()) * 5:
                await asyncio.sleep(0.3)
                worker = await victim.ready()
                os.kill(worker.pid, signal.SIGSTOP)
                stopped = time.monotonic()
                await worker.died.wait()
                require("no answer within" in str(worker.error), f"it died otherwise: {worker.error}")
                await victim.ready()
                found.append(await steps.next(name) - stopped)
    require(not counts["lost"] and not counts["wrong"], f"requests were lost or changed: {dict(counts)}")
    return {
        "stops": len(found),
        "step_timeout_s": limit,
        "answered": counts["answered"],
        "lost": counts["lost"],
        "different": counts["wrong"],
        "until_first_step": quantiles(found),
    }


async def orphans(options: argparse.Namespace) -> dict[str, Any]:
    """SIGKILL of the router, while it loads and while it answers: nothing of it lives on."""
    gone: dict[str, float] = {}
    for when in ("loading", "answering"):
        router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tokenflow.cli", "run", str(RECIPE), "--input", str(DEMO / "eval.jsonl")),
            stdout=PIPE,
            stderr=DEVNULL,
        )
        process = psutil.Process(router.pid)
        if when == "answering":
            assert router.stdout is not None
            await router.stdout.readline()
        else:
            await asyncio.sleep(1.0)
        children = process.children(recursive=True)
        require(children, f"it had started nothing while {when}")
        router.kill()
        gone[when], alive = await asyncio.to_thread(wait_for_end, children)
        await router.wait()
        require(not alive, f"alive {GONE_S:g} s after the router was killed while {when}: {alive}")
    return {"seconds_until_gone": gone}


def wait_for_end(processes: list[psutil.Process]) -> tuple[float, list[psutil.Process]]:
    """Seconds until all have ended, and those that have not in time."""
    started = time.monotonic()
    while (alive := list(filter(lives, processes))) and time.monotonic() - started < GONE_S:
        time.sleep(0.005)
    return round(time.monotonic() - started, 3), alive


def lives(process: psutil.Process) -> bool:
    """Whether it runs still; a dead one whose parent is gone is collected by init in its own time."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def loading(options: argparse.Namespace) -> dict[str, Any]:
    """A worker that dies while loading: the error comes soon, with its last words."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = demo(Path(folder), {"llm": [{"die_loading": 7}]})
        try:
            async with Router(recipe):
                raise Broken("it started")
        except WorkerDied as error:
            after = time.time() - (Path(recipe.models[1].config.path) / "lives").stat().st_mtime
            require("exit code 7; its last words:\n  chaos: dies while loading" in str(error), str(error))
    require(after < 5, f"the error came {after:.1f} s after the death")
    return {"seconds_until_error": round(after, 3), "error_has_its_stderr": True}
