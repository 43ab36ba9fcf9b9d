"""Simulation of a whole job: ranks wait for each other, and ranks that behave alike are simulated once."""

from __future__ import annotations

from hespas.simulator.job.scheduler import JobScheduler

__all__ = ["JobScheduler"]
