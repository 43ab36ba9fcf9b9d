"""Fixtures and options of all tests."""

from __future__ import annotations

import gc
import os
import sys
from functools import cache

import pytest
import typer.main
from hypothesis import HealthCheck, settings

from tests.sampling import Sampling

# Linear algebra of small fits is slower in several threads, and tests run beside each other already. Read as
# NumPy is loaded, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Commands run in processes of their own, hundreds of them: where the environment forbids to keep compiled
# modules, each would compile the package anew, which takes longer than most commands do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A command that runs in this process would build the options of all commands anew, which takes 0.1 s.
typer.main.__dict__["get_command"] = cache(typer.main.get_command)

# No test fails because the machine is busy. Each run draws other examples, so that a few per run suffice.
# Examples of a test may share its fixtures: folders, which they write anew.
settings.register_profile(
    "untimed",
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of :mod:`tests.sampling`."""
    parser.addoption("--sample", type=float, default=None, help="Run tests that take so many seconds.")
    parser.addoption("--draw", type=float, default=None, help="Run so many seconds of the other tests.")
    parser.addoption("--seed", default="", help="Text that decides which tests are drawn.")


def pytest_configure(config: pytest.Config) -> None:
    """Choose tests if an option is given."""
    seconds: float | None = config.getoption("--sample")
    if seconds is not None:
        config.pluginmanager.register(
            Sampling(seconds, config.getoption("--draw"), str(config.getoption("--seed")))
        )


def pytest_collection_finish() -> None:
    """What was collected stays to the end: a collection of garbage need not walk ten thousand tests."""
    gc.collect()
    gc.freeze()
