"""A whole job at once: who waits for whom, ranks that behave alike simulated once."""

from __future__ import annotations

from hespas.simulator.job.scheduler import JobScheduler

__all__ = ["JobScheduler"]
