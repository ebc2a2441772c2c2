"""Requests that are cancelled, that go wrong, or that are too many for the memory; and all of it for long."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.scenarios.setup import (
    DEMO,
    ROOT,
    Question,
    answer_of,
    books,
    demo,
    load,
    quantiles,
    questions,
    require,
    supervisors,
    undisturbed,
)
from bench.scenarios.trend import trend
from tokenflow.dsl.ir import RecipeIR
from tokenflow.errors import ContextTooLong, NonFiniteLogits, RequestCancelled, RouteFailed
from tokenflow.response import Response
from tokenflow.router import Router
from tokenflow.text.tokenizer import Tokenizer
from tokenflow.wire.messages import Step, StepDone

SAMPLE_S = 1.0
FLAT_MIB = 10.0
FLAT_BLOCKS = 50_000.0
"""Growth per hour that would go unnoticed for days: of a process, and of what Python has allocated in it."""


async def cancels(options: argparse.Namespace) -> dict[str, Any]:
    """Requests cancelled at random moments: while they wait, run, or are pending; as tasks or as streams."""
    dice = random.Random(options.seed)
    asked = questions(64, options.seed)
    expected = await undisturbed(asked[:1])
    outcomes: Counter[str] = Counter()
    asyncio.get_running_loop().set_debug(True)
    asyncio.get_running_loop().slow_callback_duration = 10.0
    with tempfile.TemporaryDirectory() as folder:
        recipe = demo(Path(folder), max_requests=16)
        async with Router(recipe) as router:
            await router.generate("Q: 1*1=?\nA: ", max_tokens=4)
            tasks_before = len(asyncio.all_tasks())
            todo = iter(range(options.cancels))

            async def work() -> None:
                for number in todo:
                    outcomes[await cancelled(router, asked[number % len(asked)], number, dice)] += 1

            started = time.monotonic()
            await asyncio.gather(*(work() for _ in range(48)))
            seconds = time.monotonic() - started
            await asyncio.sleep(2.0)
            held = books(recipe)
            system = router._system
            assert system is not None
            left = {"active": system.active, "queued": system.queued, "booked": len(system._ledger)}
            tasks = len(asyncio.all_tasks()) - tasks_before
            answer = answer_of(await router.generate(asked[0].prompt, **asked[0].sampling))
    require(all(book == {"open": 0, "tokens": 0} for book in held.values()), f"engines hold {held}")
    require(not any(left.values()), f"the router holds {left}")
    require(not tasks, f"{tasks} tasks are left")
    require(answer == expected[0], "the next request is answered otherwise")
    return {
        "cancels": options.cancels,
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(outcomes.items())),
        "engines_after_2_s": held,
        "router_after_2_s": left,
        "tasks_left": tasks,
        "next_answer": "identical",
    }


async def cancelled(router: Router, question: Question, number: int, dice: random.Random) -> str:
    """Cancel a request after a random time, in one of four ways; returns what became of it."""
    response = router.stream(question.prompt, **question.sampling)
    waiting: asyncio.Future[object]
    delay = 10 ** dice.uniform(-3, 0.2)
    match number % 4:
        case 0:
            waiting = asyncio.ensure_future(response.completion())
            await asyncio.sleep(delay)
            waiting.cancel()
        case 1:
            waiting = asyncio.ensure_future(response.completion())
            await asyncio.sleep(delay)
            response.close()
        case 2:
            waiting = asyncio.ensure_future(some_of(response, dice.randrange(1, 40)))
        case _:
            waiting = asyncio.ensure_future(response.completion())
            await asyncio.sleep(delay)
            await response.aclose()
    try:
        await waiting
    except asyncio.CancelledError:
        return "task cancelled"
    except RequestCancelled:
        return "closed"
    return "left its stream" if number % 4 == 2 else "answered before"


async def some_of(response: Response, events: int) -> None:
    """Read some events of a stream, then leave it."""
    async with response:
        async for _ in response:
            events -= 1
            if not events:
                break


async def memory(options: argparse.Namespace) -> dict[str, Any]:
    """KV cache for four requests and 64 clients: all finish, with the same text, in bounded time."""
    asked = questions(64, options.seed)
    expected = await undisturbed(asked)
    longest = max(len(answer.tokens) for answer in expected) + 80
    opens = Opens()
    with tempfile.TemporaryDirectory() as folder:
        recipe = demo(Path(folder), kv_cache=4 * longest)
        async with Router(recipe, observer=opens) as router:
            started = time.monotonic()
            done = await asyncio.gather(
                *(router.generate(question.prompt, **question.sampling) for question in asked)
            )
            seconds = time.monotonic() - started
    require([answer_of(completion) for completion in done] == expected, "answers changed")
    # Whoever is older is admitted first and preempted last: nobody waits for more than those before him.
    require(opens.begun == sorted(opens.begun), f"somebody who came later began earlier: {opens.begun}")
    waits = [completion.timing.queued_s for completion in done]
    service = [completion.timing.latency_s - completion.timing.queued_s for completion in done]
    bound = 64 / 4 * max(service)
    require(max(waits) <= bound, f"somebody waited {max(waits):.1f} s; 16 turns take {bound:.1f} s")
    return {
        "clients": 64,
        "kv_cache_tokens": 4 * longest,
        "seconds": round(seconds, 2),
        "different": 0,
        "began_in_order_of_arrival": True,
        "wait": quantiles(waits),
        "first_token": quantiles([completion.timing.ttft_s for completion in done]),
        "longest_service_ms": round(max(service) * 1e3, 1),
        "preempted": len(opens.rebuilt),
        "most_preemptions_of_one": max(opens.rebuilt.values(), default=0),
    }


class Opens:
    """Which requests began at the entry, in order, and how often each was rebuilt after a preemption."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.rebuilt: dict[int, int] = {}

    def __call__(self, model: str, step: Step, done: StepDone) -> None:
        for opened in step.open:
            if opened.epoch:
                self.rebuilt[opened.handle] = max(self.rebuilt.get(opened.handle, 0), opened.epoch)
            elif model == "slm":
                self.begun.append(opened.handle)


async def mixed(options: argparse.Namespace) -> dict[str, Any]:
    """Three requests that go wrong among thirty: NaN logits, a route that raises, a prompt too long."""
    asked = questions(27, options.seed)
    expected = await undisturbed(asked)
    with tempfile.TemporaryDirectory() as folder:
        lives = {"slm": [{"nan_token": Tokenizer.load(DEMO / "small").encode("~")[-1]}]}
        recipe = demo(Path(folder), lives, source=ROOT / "bench" / "scenarios" / "faulty.py")
        async with Router(recipe) as router:
            results = await asyncio.gather(
                *(router.generate(question.prompt, **question.sampling) for question in asked),
                router.generate("Q: ~93*7=?\nA: ", max_tokens=40),
                router.generate("Q: 93*7=?\nA: ", max_tokens=40, params={"fault": 1}),
                router.generate("Q: " + "9" * 5000, max_tokens=40),
                return_exceptions=True,
            )
    *good, nan, raised, long = results
    kinds = [type(result).__name__ for result in (nan, raised, long)]
    wanted = [error.__name__ for error in (NonFiniteLogits, RouteFailed, ContextTooLong)]
    require(kinds == wanted, f"the wrong ones ended with {kinds}")
    answered = [answer_of(result) for result in good if not isinstance(result, BaseException)]
    require(len(answered) == len(good), "a good one failed")
    require(answered == expected, "a good one changed")
    return {"good": len(good), "different": 0, "failed": kinds}


def allocated(recipe: RecipeIR, process: str) -> int:
    """Blocks of memory that Python holds: in this process, or in a worker when it last said so."""
    if process == "router":
        return sys.getallocatedblocks()
    said = Path(recipe.model(process).config.path) / "blocks"
    return int(said.read_text()) if said.exists() else 0


def tenths(values: Sequence[float]) -> list[float]:
    """What was measured at the start, after a tenth of the time, and so on to the end."""
    last = len(values) - 1
    return [values[last * part // 10] for part in range(11)]


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Answers, cancels and preemptions for a long time: memory stays flat."""
    dice = random.Random(options.seed)
    asked = questions(64, options.seed)
    expected = await undisturbed(asked)
    # Arrays of numbers: what is measured must not grow by being measured.
    times = array("d")
    with tempfile.TemporaryDirectory() as folder:
        recipe = demo(Path(folder), kv_cache=12 * 300, max_requests=16)
        async with Router(recipe) as router:
            processes = {"router": psutil.Process()}
            processes |= {name: psutil.Process(victim.pid) for name, victim in supervisors(router).items()}
            rss = {name: array("d") for name in processes}
            objects = {name: array("d") for name in processes}
            started = time.monotonic()
            async with load(router, asked, expected, 16) as counts:
                number = 0
                while (now := time.monotonic() - started) < options.seconds:
                    if now >= len(times) * SAMPLE_S:
                        gc.collect()
                        times.append(now)
                        for name, process in processes.items():
                            rss[name].append(process.memory_info().rss / 2**20)
                            objects[name].append(allocated(recipe, name))
                    await cancelled(router, asked[number % len(asked)], number, dice)
                    number += 1
    require(not counts["lost"] and not counts["wrong"], f"requests were lost or changed: {dict(counts)}")
    trends = {name: trend(times, values) for name, values in rss.items()}
    verdicts = {name: found.verdict(FLAT_MIB) for name, found in trends.items()}
    held = {name: trend(times, values) for name, values in objects.items()}
    verdicts |= {f"objects of {name}": found.verdict(FLAT_BLOCKS) for name, found in held.items()}
    facts = {
        "seconds": options.seconds,
        "answered": counts["answered"],
        "cancelled": number,
        "lost": counts["lost"],
        "different": counts["wrong"],
        "rss_mib": {name: [round(value, 1) for value in tenths(values)] for name, values in rss.items()},
        "slope_mib_per_hour": {name: str(found) for name, found in trends.items()},
        "slope_objects_per_hour": {name: str(found) for name, found in held.items()},
        "flat_below": {"mib_per_hour": FLAT_MIB, "objects_per_hour": FLAT_BLOCKS},
        "verdict": verdicts,
    }
    require("grows" not in verdicts.values(), json.dumps(facts))
    return facts
