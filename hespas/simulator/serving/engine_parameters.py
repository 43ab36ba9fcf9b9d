"""Parameters of serving engines that ship with the package: fits to measured runs of servers.

``engine_parameters.toml`` has the parameters of stacks: an engine on a device, and for mixtures of experts
with one format of experts. ``python -m tools.serving`` fits them to the rows of a table that calibrate. They
correct the steps of :func:`hespas.api.serve`, and are the prior of fits to runs of a user.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from hespas.simulator.serving.steps import Correction

__all__ = [
    "PARAMETERS_FILE",
    "EngineParameters",
    "Stack",
    "engine_parameters",
    "parameters_of",
    "shared_parameters",
]

PARAMETERS_FILE = Path(__file__).with_name("engine_parameters.toml")
"""The file of the parameters."""
_ESTIMATOR = "composite"
"""Estimator with which the parameters were fitted."""
_CARRIED = frozenset({"prompt_ns", "request_ns", "launch_ns"})
"""Parameters that carry over to other devices: host times of prompts, requests and kernel launches. The
others correct the estimates of the kernels of one device; on devices left out, they made TPOT worse.
"""


class EngineParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a stack (``H100-SXM vllm``, ``B200-SXM trtllm nvfp4 experts``), fitted to ``rows`` runs.

    ``apart`` is the relative spread of errors between runs of one deployment (release, model, precision).
    """

    name: str
    rows: int
    apart: float
    parameters: dict[str, float]

    @property
    def evidence(self) -> str:
        """Return the measured runs behind the parameters."""
        runs = f"{self.rows:,} run{'s' * (self.rows != 1)} of {self.name}"
        return f"host times of {runs} on other stacks" if self.is_carried else runs

    @property
    def is_carried(self) -> bool:
        """Return True if only host times of other stacks are known."""
        return self.parameters.keys() == _CARRIED

    @property
    def correction(self) -> Correction:
        """Return the parameters as a correction of step times."""
        return Correction(**self.parameters)


class _EngineParametersFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of :data:`PARAMETERS_FILE`."""

    engine: list[EngineParameters]


class Stack(NamedTuple):
    """Engine on a device. ``experts`` is the format of experts; empty for models without experts. Separate
    prefill and decode servers (``is_disaggregated``) have other routers and host times.
    """

    device: str
    engine: str
    experts: str = ""
    is_disaggregated: bool = False

    @property
    def name(self) -> str:
        """Return the name of the stack (``B200-SXM trtllm disaggregated nvfp4 experts``)."""
        separate = "disaggregated" if self.is_disaggregated else ""
        experts = f"{self.experts} experts" if self.experts else ""
        return " ".join(filter(None, (self.device, self.engine, separate, experts)))


@cache
def engine_parameters() -> Mapping[str, EngineParameters]:
    """Return the parameters of stacks that ship with the package by name, and their medians over devices by
    name without the device.
    """
    document = msgspec.toml.decode(PARAMETERS_FILE.read_bytes(), type=_EngineParametersFile)
    return shared_parameters(document.engine) | {stack.name: stack for stack in document.engine}


def shared_parameters(stacks: Iterable[EngineParameters]) -> dict[str, EngineParameters]:
    """Return the median parameters of each engine over its devices, by name without the device (``vllm``,
    ``trtllm nvfp4 experts``). They are the prior of fits on other devices.
    """
    groups: dict[str, list[EngineParameters]] = {}
    for stack in stacks:
        if engine := stack.name.partition(" ")[2]:
            groups.setdefault(engine, []).append(stack)
    return {name: _medians(name, members) for name, members in groups.items()}


def parameters_of(
    stack: Stack, estimator: str, known: Mapping[str, EngineParameters] | None = None
) -> EngineParameters | None:
    """Return the parameters of a stack. None if no device has runs of the engine, or if steps are estimated
    with another ``estimator`` than in the fits.

    A stack with fewer measured runs than parameters gets the host times of prompts, requests and kernel
    launches of its engine: the medians over the stacks of the engine with more runs. For separate prefill and
    decode servers, servers on the device that run both come first. ``known`` has parameters by name (None:
    all that ship).
    """
    if estimator != _ESTIMATOR:
        return None
    stacks = engine_parameters() if known is None else known
    fitted = {name: fit for name, fit in stacks.items() if fit.rows >= len(fit.parameters)}
    together = stack._replace(is_disaggregated=False)
    for name in (stack.name, together.name):
        if name in fitted:
            return fitted[name]
    members: list[EngineParameters] = []
    for parameters in fitted.values():
        words = parameters.name.split(" ")
        if words[1:2] == [stack.engine] and ("disaggregated" in words) == stack.is_disaggregated:
            members.append(parameters)
    if not members:
        return parameters_of(together, estimator, known) if stack.is_disaggregated else None
    shared = _medians(Stack("", stack.engine, is_disaggregated=stack.is_disaggregated).name, members)
    carried = {key: value for key, value in shared.parameters.items() if key in _CARRIED}
    return msgspec.structs.replace(shared, parameters=carried)


def _medians(name: str, members: list[EngineParameters]) -> EngineParameters:
    return EngineParameters(
        name=name,
        rows=sum(stack.rows for stack in members),
        apart=median(stack.apart for stack in members),
        parameters={key: median(stack.parameters[key] for stack in members) for key in members[0].parameters},
    )
