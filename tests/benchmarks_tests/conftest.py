"""Skip of the tests of the ground truth capture, which cannot be imported without JAX."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("jax") else ["test_ground_truth_*.py"]


def pytest_report_header() -> str:
    """Says what is left out, and why."""
    left_out = "tests of benchmarks.ground_truth: left out, JAX is not installed"
    return left_out if collect_ignore_glob else "tests of benchmarks.ground_truth: JAX is installed"
