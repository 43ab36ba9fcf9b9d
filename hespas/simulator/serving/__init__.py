"""Simulation of language-model servers: continuous batching of requests over time, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas.graph.plugins import lazy_names

if TYPE_CHECKING:
    from hespas.simulator.serving.disaggregated import serve_disaggregated
    from hespas.simulator.serving.engine import (
        POLICIES,
        Order,
        Policy,
        ServerPool,
        policy_of,
        serve,
        serve_replicas,
    )
    from hespas.simulator.serving.requests import (
        Requests,
        ServingRun,
        StepLog,
        arrivals_of_bursts,
        arrivals_of_poisson,
        lengths,
        weighted_percentile,
    )
    from hespas.simulator.serving.step_estimates import KernelModel, LatticeKernels, models_of, step_times
    from hespas.simulator.serving.steps import SHARES, Correction, Drafts, StepGrids, StepTimes

__all__ = [
    "POLICIES",
    "SHARES",
    "Correction",
    "Drafts",
    "KernelModel",
    "LatticeKernels",
    "Order",
    "Policy",
    "Requests",
    "ServerPool",
    "ServingRun",
    "StepGrids",
    "StepLog",
    "StepTimes",
    "arrivals_of_bursts",
    "arrivals_of_poisson",
    "lengths",
    "models_of",
    "policy_of",
    "serve",
    "serve_disaggregated",
    "serve_replicas",
    "step_times",
    "weighted_percentile",
]

__getattr__ = lazy_names(
    __name__,
    disaggregated=("serve_disaggregated",),
    engine=(
        "POLICIES",
        "Order",
        "Policy",
        "ServerPool",
        "policy_of",
        "serve",
        "serve_replicas",
    ),
    requests=(
        "Requests",
        "ServingRun",
        "StepLog",
        "arrivals_of_bursts",
        "arrivals_of_poisson",
        "lengths",
        "weighted_percentile",
    ),
    step_estimates=("KernelModel", "LatticeKernels", "models_of", "step_times"),
    steps=("SHARES", "Correction", "Drafts", "StepGrids", "StepTimes"),
)
