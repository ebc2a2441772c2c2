"""SGLang workers as processes: they recover like all others, and leave nothing behind."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.reference.cases import DEMO
from tests.reference.record import eval_prompts
from tests.sglang.members import on_sglang
from tokenflow.router import Router
from tokenflow.wire.messages import Step, StepDone

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

RECIPE = DEMO.parent / "demo.yaml"
REQUEST: dict[str, Any] = {"max_tokens": 60, "concurrency": 4}
PROMPTS = eval_prompts(200)[:8]


class Belongings:
    """What worker processes have of the machine while they run: processes, ports, shared memory."""

    def __init__(self) -> None:
        self.processes = psutil.Process().children(recursive=True)
        self.ports: list[int] = []
        self.shared: set[str] = set()
        for process in self.processes:
            connections = process.net_connections("inet")
            self.ports += [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN]
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            self.shared |= set(re.findall(r"/dev/shm/\S+", maps))

    def left(self) -> list[str]:
        """What is still there."""
        _, alive = psutil.wait_procs(self.processes, timeout=5)
        listening = {
            one.laddr.port for one in psutil.net_connections("inet") if one.status == psutil.CONN_LISTEN
        }
        return [
            *(f"process {process.pid}" for process in alive),
            *(f"port {port}" for port in self.ports if port in listening),
            *(file for file in self.shared if Path(file).exists()),
        ]


def files_in(folder: Path) -> list[Path]:
    """What is in a folder."""
    return list(folder.iterdir())


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of this test's workers."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


async def test_two_workers_share_a_machine_and_leave_nothing_behind(temporary: Path) -> None:
    for _ in range(int(os.environ.get("STARTS", "2"))):
        async with Router(RECIPE, overrides=on_sglang("slm", "llm")) as router:
            answer = await router.generate(PROMPTS[0], max_tokens=10)
            assert len(answer.tokens) == 10
            belongings = Belongings()
        assert belongings.left() == []
        assert files_in(temporary) == []


@pytest.mark.parametrize("members", [("slm", "llm"), ("llm",)], ids="+".join)
async def test_models_that_choose_their_cache_hold_as_many_tokens_on_any_engine(
    members: tuple[str, ...],
) -> None:
    """Here there is room for all that their requests can ever need."""
    limits = {"kv_cache": "auto", "context_length": 500, "max_requests": 8}
    both = [f"models.{model}.{key}={value}" for model in ("slm", "llm") for key, value in limits.items()]
    async with Router(RECIPE, overrides=[*on_sglang(*members), *both]) as router:
        assert len((await router.generate(PROMPTS[0], max_tokens=10)).tokens) == 10
        assert {model.kv_capacity for model in router.status.models} == {8 * 500}


@pytest.mark.parametrize("parallel", [1, 2])
async def test_a_killed_worker_changes_no_answer(
    parallel: int, temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks of the killed worker go with it; it has no shared memory that somebody must tidy up."""
    core = min(os.sched_getaffinity(0))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{core}|{core}")
    async with Router(RECIPE) as router:
        expected = await router.generate_many(PROMPTS, **REQUEST)
    killed: list[Belongings] = []

    def kill(model: str, step: Step, done: StepDone) -> None:
        if model == "llm" and step.rows and step.id > 20 and not killed:
            killed.append(Belongings())
            assert not [file for file in killed[0].shared if Path(file).exists()]
            assert router._system is not None
            actor = next(one for one in router._system.actors.values() if one.model.name == "llm")
            first = psutil.Process(actor.supervisor.pid)
            assert sum("follower" in " ".join(one.cmdline()) for one in first.children()) == parallel - 1
            first.kill()

    overrides = on_sglang("llm", tensor_parallel=parallel)
    async with Router(RECIPE, overrides=overrides, observer=kill) as router:
        answers = await router.generate_many(PROMPTS, **REQUEST)
        assert killed
    assert [(one.token_ids, one.models) for one in answers] == [
        (one.token_ids, one.models) for one in expected
    ]
    assert killed[0].left() == []
    assert "ended with signal 9 (SIGKILL)" in caplog.text
