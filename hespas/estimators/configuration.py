"""The default configuration of a step's time: estimator, fusion, host launches and contention by workload.

Every command that predicts the time of a step takes its configuration from here, so that they agree. Each
choice is the one with the best evidence for that kind of workload:

* training steps of language models: ``training`` on ``composite``, kernels that a host launches one by one,
  and one share by which kernels are slower during communication (docs/accuracy/training.md).
* all others (compiled and captured programs, recorded profiles, steps of serving, operators of PyTorch):
  ``composite``, and contention by kernel and collective (docs/accuracy/index.md, docs/accuracy/serving.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any, Literal

from hespas.estimators.interface import Estimator, for_job
from hespas.estimators.registry import load_estimator
from hespas.estimators.training import Training
from hespas.graph import StepFacts, Workload, step_facts
from hespas.graph.workload import StepKind
from hespas.hardware import Device
from hespas.hardware.kernel_shares import LIBRARIES, Library

__all__ = [
    "AUTO",
    "BASE",
    "Configuration",
    "WorkloadKind",
    "beside_share",
    "default_configuration",
    "host_issue_ns",
    "operation_estimator",
    "training_estimator",
    "workload_kind",
]

AUTO = "auto"
"""The spelling of the default estimator, which depends on the workload."""
BASE = "composite"
"""The estimator of single operations."""

WorkloadKind = Literal["training", "serving", "eager", "program", "recorded"]
"""Kinds of workloads with different defaults or errors of their steps: generated training steps of language
models, steps of serving, steps of PyTorch run operator by operator; programs and traces; profiles.
"""
_KINDS: Mapping[StepKind, WorkloadKind] = {"training": "training", "serving": "serving", "eager": "eager"}
"""Generated steps of other kinds have not been compared with measured ones and count as programs."""

_ISSUE_NS: Mapping[str, float] = {"kernels": 20_000.0, "partial-graphs": 10_000.0, "whole": 0.0}
"""Host time per kernel of eager PyTorch, of passes with partial CUDA graphs, and of whole-step graphs.
They are round figures, chosen on the development rows of docs/accuracy/training.md.
"""
_SLOWDOWN: Mapping[str, float] = {"gpu": 0.06}
"""Share by which kernels of a training step are slower during communication, by kind of device: a round
figure, chosen on the development rows of docs/accuracy/training.md.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Settings for the prediction of a step time.

    ``estimator`` is a name in the registry, with options. ``host_issue_ns`` is the time that the host needs
    to launch one kernel (0: the step is launched as a whole). ``beside`` is the relative slowdown of kernels
    that run during communication, such as 0.1 (NaN: use the values by kernel and collective of
    :mod:`hespas.simulator.interference`). ``step_factor`` selects the factor on whole steps from the file of
    the device (:func:`hespas.estimators.step_intervals.applied_factor`).
    """

    kind: WorkloadKind
    estimator: str
    host_issue_ns: float = 0.0
    reads_counts: bool = False
    separate_experts: int = 0
    beside: float = nan
    step_factor: str = AUTO

    def model(self, num_ranks: int) -> Estimator:
        """Return the estimator object for a job of ``num_ranks`` ranks."""
        return for_job(load_estimator(self.estimator), num_ranks)


def default_configuration(
    workload: Workload, device: Device, estimator: str = AUTO, *, step_factor: str = AUTO
) -> Configuration:
    """Return the configuration for a workload on a device; a named ``estimator`` replaces the default one,
    and a named ``step_factor`` the factor of the workload's framework and phase.
    """
    kind, facts = workload_kind(workload), step_facts(workload.metadata)
    if facts is None or kind != "training":
        estimator = operation_estimator(estimator)
        return Configuration(kind=kind, estimator=estimator, step_factor=step_factor)
    return Configuration(
        kind=kind,
        estimator=_training_spelling(facts, device, estimator),
        host_issue_ns=host_issue_ns(facts, device),
        reads_counts=facts.reads_counts,
        separate_experts=facts.separate_experts,
        beside=beside_share(device),
        step_factor=step_factor,
    )


def operation_estimator(estimator: str) -> str:
    """Return the estimator for single operations that do not belong to a step. The automatic choice is
    :data:`BASE`.
    """
    return BASE if estimator == AUTO else estimator


def workload_kind(workload: Workload) -> WorkloadKind:
    """Return the kind of a workload, for example a training step, from its metadata."""
    facts = step_facts(workload.metadata)
    if facts is not None:
        return _KINDS.get(facts.kind, "program")
    return "recorded" if workload.metadata.get("device") else "program"


def host_issue_ns(facts: StepFacts, device: Device) -> float:
    """Return the time [ns] that the host needs to launch one kernel of a step; 0 on devices other than
    GPUs.
    """
    return _ISSUE_NS[facts.launch] if device.kind == "gpu" else 0.0


def beside_share(device: Device) -> float:
    """Return the relative slowdown of kernels of a training step while the device communicates, such as 0.1
    for 10 %. Both share the compute units and the memory of the device.
    """
    return _SLOWDOWN.get(device.kind, 0.0)


def training_estimator(facts: StepFacts, device: Device, base: str, num_ranks: int) -> Estimator:
    """Return the estimator of training steps that uses ``base`` for times without a published rate. Its
    options are derived from the facts of a step.

    If ``base`` is itself an estimator of training steps, its stated options are kept.
    """
    if base.partition(":")[0] == "training":
        model = load_estimator(_training_spelling(facts, device, base))
    else:
        model = Training(base=base, **_training_options(facts, device))
    return for_job(model, num_ranks)


def _training_spelling(facts: StepFacts, device: Device, estimator: str) -> str:
    """Return the name and options of the estimator of a training step. Other estimators are returned
    unchanged.
    """
    name, _, text = ("training" if estimator == AUTO else estimator).partition(":")
    if name != "training":
        return estimator
    named = {part.partition("=")[0] for part in text.split(",")}
    parts = [text] if text else []
    for option, value in _training_options(facts, device).items():
        if option not in named:
            parts.append(f"{option}={str(value).lower() if isinstance(value, bool) else value}")
    return f"{name}:{','.join(parts)}" if parts else name


def _training_options(facts: StepFacts, device: Device) -> dict[str, Any]:
    """Return the options of :class:`Training` in which a step differs from the defaults."""
    options: dict[str, Any] = {"attention": _LIBRARIES.get(facts.library, "cudnn")}
    if device.vendor != "NVIDIA":
        options["attention"] = "splash" if device.kind == "tpu" else "measured"
    if not facts.compiled:
        options["fused"] = False
    if facts.device == device.name:
        options |= {"power_w": facts.power_w} if facts.power_w else {}
        options |= {"bandwidth": facts.bandwidth} if facts.bandwidth != 1.0 else {}
    return options


_LIBRARIES: Mapping[str, Library] = {name: name for name in LIBRARIES}
