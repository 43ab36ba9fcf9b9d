"""Workloads that nobody recorded: symbolic models at any parallelism, benchmarks, random programs, and traces
of a small run taken to another size.
"""

from hespas.generators.spec import Account, Filling, Generator

__all__ = ["Account", "Filling", "Generator"]
