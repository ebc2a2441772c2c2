"""Settings from the environment, read in this module only."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cache

from tokenflow.errors import TokenflowError

_HUGE_PAGES = "glibc.malloc.hugetlb"


@dataclass(frozen=True, slots=True)
class Settings:
    """Process-wide settings; every field has an environment twin.

    :param hub_offline: ``HF_HUB_OFFLINE``: never ask the model hub.
    :param no_color: ``NO_COLOR``: plain terminal output.
    :param log_level: ``TOKENFLOW_LOG_LEVEL``: level of the ``tokenflow`` logger.
    """

    hub_offline: bool
    no_color: bool
    log_level: str


@cache
def settings() -> Settings:
    """The settings of this process; :raises TokenflowError: for a value that means nothing."""
    level = os.environ.get("TOKENFLOW_LOG_LEVEL", "warning").upper()
    if level not in logging.getLevelNamesMapping():
        known = ", ".join(name.lower() for name in logging.getLevelNamesMapping())
        raise TokenflowError(f"TOKENFLOW_LOG_LEVEL is {level.lower()!r}; it must be one of {known}")
    return Settings(
        hub_offline=os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"},
        no_color=bool(os.environ.get("NO_COLOR")),
        log_level=level,
    )


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a worker process that may use ``threads`` cores.

    Workers share the machine: left to themselves, each would start one thread per core and they would
    spend their time waiting for each other.  Weights lie in huge pages where the system grants them: a step
    reads them all, and with small pages a good part of it is spent on finding them.
    """
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if _HUGE_PAGES not in tunables:
        tunables = f"{tunables}:{_HUGE_PAGES}=1".lstrip(":")
    return {**os.environ, **limits, "GLIBC_TUNABLES": tunables, "TOKENIZERS_PARALLELISM": "false"}
