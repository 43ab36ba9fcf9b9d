"""Synthetic workloads: symbolic models at any parallelism, benchmarks, random programs, and rescaled traces
of smaller runs.
"""

from hespas.generators.spec import Account, Filling, Generator

__all__ = ["Account", "Filling", "Generator"]
