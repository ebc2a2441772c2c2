"""Requests that are cancelled, that go wrong, or that are too many for the memory; and all of it for long."""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import tempfile
import time
from collections import Counter
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
from tokenflow.errors import ContextTooLong, NonFiniteLogits, RequestCancelled, RouteFailed
from tokenflow.response import Response
from tokenflow.router import Router
from tokenflow.text.tokenizer import Tokenizer


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
    with tempfile.TemporaryDirectory() as folder:
        recipe = demo(Path(folder), kv_cache=4 * longest)
        async with Router(recipe) as router:
            started = time.monotonic()
            done = await asyncio.gather(
                *(router.generate(question.prompt, **question.sampling) for question in asked)
            )
            seconds = time.monotonic() - started
    require([answer_of(completion) for completion in done] == expected, "answers changed")
    waits = [completion.timing.ttft_s for completion in done]
    service = [completion.timing.latency_s - completion.timing.ttft_s for completion in done]
    bound = 64 / 4 * max(service)
    require(max(waits) <= bound, f"somebody waited {max(waits):.1f} s; 16 turns take {bound:.1f} s")
    return {
        "clients": 64,
        "kv_cache_tokens": 4 * longest,
        "seconds": round(seconds, 2),
        "different": 0,
        "wait": quantiles(waits),
        "longest_service_ms": round(max(service) * 1e3, 1),
        "served_in_order_of_arrival": waits == sorted(waits),
    }


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
    require(not any(isinstance(result, BaseException) for result in good), "a good one failed")
    require([answer_of(result) for result in good] == expected, "a good one changed")
    return {"good": len(good), "different": 0, "failed": kinds}


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Answers, cancels and preemptions for a long time: memory stays flat."""
    dice = random.Random(options.seed)
    asked = questions(64, options.seed)
    expected = await undisturbed(asked)
    samples: list[tuple[float, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = demo(Path(folder), kv_cache=12 * 300, max_requests=16)
        async with Router(recipe) as router:
            processes = {"router": psutil.Process()}
            processes |= {name: psutil.Process(victim.pid) for name, victim in supervisors(router).items()}
            started = time.monotonic()
            async with load(router, asked, expected, 16) as counts:
                number = 0
                while (now := time.monotonic() - started) < options.duration:
                    if number % 50 == 0:
                        gc.collect()
                        rss = {name: process.memory_info().rss / 2**20 for name, process in processes.items()}
                        samples.append((now, rss))
                    await cancelled(router, asked[number % len(asked)], number, dice)
                    number += 1
    require(not counts["lost"] and not counts["wrong"], f"requests were lost or changed: {dict(counts)}")
    hours = [seconds / 3600 for seconds, _ in samples if seconds > options.duration / 5]
    steady = [rss for _, rss in samples][-len(hours) :]
    slopes = {
        name: round(statistics.linear_regression(hours, [rss[name] for rss in steady]).slope, 2)
        for name in processes
    }
    ends = samples[0][1], samples[-1][1]
    return {
        "seconds": options.duration,
        "answered": counts["answered"],
        "cancelled": number,
        "lost": counts["lost"],
        "different": counts["wrong"],
        "rss_mib": {name: [round(rss[name], 1) for rss in ends] for name in processes},
        "slope_mib_per_hour": slopes,
    }
