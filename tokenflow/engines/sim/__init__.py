"""Simulated models: a worker that sleeps as long as a step would take, and routes as it is told."""

from tokenflow.engines.sim.worker import SimWorker

__all__ = ["SimWorker"]
