"""Servers of language models: continuous batching of requests over time, step by step."""

from hespas.simulator.serving.engine import serve
from hespas.simulator.serving.policy import POLICIES, Order, Policy, policy_of
from hespas.simulator.serving.requests import (
    Requests,
    arrivals_of_bursts,
    arrivals_of_poisson,
    lengths,
    share_of,
)
from hespas.simulator.serving.results import ServingRun, Steps, weighted_percentile
from hespas.simulator.serving.steps import (
    SHARES,
    Asked,
    Correction,
    LatticeKernels,
    StepGrids,
    StepTimes,
    models_of,
    step_times,
)

__all__ = [
    "POLICIES",
    "SHARES",
    "Asked",
    "Correction",
    "LatticeKernels",
    "Order",
    "Policy",
    "Requests",
    "ServingRun",
    "StepGrids",
    "StepTimes",
    "Steps",
    "arrivals_of_bursts",
    "arrivals_of_poisson",
    "lengths",
    "models_of",
    "policy_of",
    "serve",
    "share_of",
    "step_times",
    "weighted_percentile",
]
