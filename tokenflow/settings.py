"""Settings from the environment, read in this module only."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cache

from tokenflow.errors import TokenflowError

_HUGE_PAGES = "glibc.malloc.hugetlb"
SGLANG_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""The cores of each rank on a CPU, with ``|`` between the ranks; SGLang reads it."""
_POLL = {"": None, "on": True, "off": False}


@dataclass(frozen=True, slots=True)
class Settings:
    """Process-wide settings; every field has an environment twin.

    :param hub_offline: ``HF_HUB_OFFLINE``: never ask the model hub.
    :param no_color: ``NO_COLOR``: plain terminal output.
    :param poll: ``TOKENFLOW_POLL``, ``on`` or ``off``: whether the router's event loop stays awake while
        models compute; without it, it does if none of them computes on this machine's CPU.
    :param log_level: ``TOKENFLOW_LOG_LEVEL``: level of the ``tokenflow`` logger.
    """

    hub_offline: bool
    no_color: bool
    poll: bool | None
    log_level: str


@cache
def settings() -> Settings:
    """The settings of this process; :raises TokenflowError: for a value that means nothing."""
    level = os.environ.get("TOKENFLOW_LOG_LEVEL", "warning").upper()
    if level not in logging.getLevelNamesMapping():
        known = ", ".join(name.lower() for name in logging.getLevelNamesMapping())
        raise TokenflowError(f"TOKENFLOW_LOG_LEVEL is {level.lower()!r}; it must be one of {known}")
    poll = os.environ.get("TOKENFLOW_POLL", "").lower()
    if poll not in _POLL:
        raise TokenflowError(f"TOKENFLOW_POLL is {poll!r}; it must be on or off")
    return Settings(
        hub_offline=os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"},
        no_color=bool(os.environ.get("NO_COLOR")),
        poll=_POLL[poll],
        log_level=level,
    )


def option(name: str) -> str | None:
    """What ``TOKENFLOW_<name>`` says; nothing if it is not set, or empty."""
    return os.environ.get(f"TOKENFLOW_{name}") or None


def secret(name: str) -> str | None:
    """The value of an environment variable that a recipe names, a key say; None if it is not set."""
    return os.environ.get(name)


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a worker process that may use ``threads`` cores.

    Workers share the machine: left to themselves, each would start one thread per core and they would
    spend their time waiting for each other.  Weights lie in huge pages where the system grants them: a step
    reads them all, and with small pages a good part of it is spent on finding them.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if _HUGE_PAGES not in tunables:
        tunables = f"{tunables}:{_HUGE_PAGES}=1".lstrip(":")
    own = {"GLIBC_TUNABLES": tunables, "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **_thread_limits(threads), **own}


def limit_threads(threads: int) -> None:
    """Let what this process starts use ``threads`` cores, as :func:`worker_environment` would."""
    os.environ.update(_thread_limits(threads))


def _thread_limits(threads: int) -> dict[str, str]:
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))


def prepare_sglang(*, cpu: bool) -> None:
    """Set what SGLang reads from the environment, before it is imported; what the user has set stays.

    ``cpu`` makes it take its CPU code paths; otherwise these are what its own launcher sets for CUDA.  Ranks
    get their orders from us, so the queue between them, whose shared memory would outlive a killed worker, is
    left out.
    """
    cuda = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    own = {"SGLANG_USE_CPU_ENGINE": "1"} if cpu else cuda
    for name, value in {**own, "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0"}.items():
        os.environ.setdefault(name, value)


def sglang_cores() -> list[str] | None:
    """What :data:`SGLANG_CORES` says of each rank; ``None`` where SGLang divides the cores itself."""
    cores = os.environ.get(SGLANG_CORES, "all")
    return None if cores == "all" else cores.split("|")
