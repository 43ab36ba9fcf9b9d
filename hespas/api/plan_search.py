"""Best-first search over the layouts of a training step on several machines, with its proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf, nan
from typing import TYPE_CHECKING, Literal, NamedTuple

from hespas.api.lowering import STEP_ESTIMATOR
from hespas.api.plan_bounds import Bound, LayoutBounds
from hespas.api.plan_result import PlanProof, PlanRow
from hespas.api.simulation_job import StepJob
from hespas.generators.llm.space import Candidate, LayoutSpace
from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError
from hespas.graph.progress import Progress
from hespas.hardware import Device, System
from hespas.hardware.prices import DeviceTerms
from hespas.simulator.memory import fits_memory

if TYPE_CHECKING:
    from hespas.generators.llm import LlmStep
    from hespas.generators.spec import Account
    from hespas.simulator import Simulation

__all__ = ["LayoutSearch", "Machine", "Objective"]

Objective = Literal["time", "price", "energy"]
_MOST_MORE = 50
"""Layouts per wanted row that are tried, after the best one is proven, to fill the list of the next best."""


class Machine(NamedTuple):
    """Cluster that layouts are planned for."""

    name: str
    hardware: str
    device: Device
    devices: int
    system: System | None
    factor: float
    terms: DeviceTerms


class _Space(NamedTuple):
    """Layouts of one machine, with their simulator and bounds."""

    machine: Machine
    candidates: Sequence[Candidate]
    job: StepJob
    bounds: LayoutBounds


class _Entry(NamedTuple):
    """Layout in the queue: its bound of the objective and of the price, the numbers of its space and of the
    layout in it, and whether the bound omits recomputation.
    """

    value: float
    space: int
    layout: int
    price: float
    is_rough: bool


@dataclass
class LayoutSearch:
    """Best-first search over the layouts of all machines."""

    step: LlmStep
    machines: Sequence[Machine]
    axes: Mapping[str, Sequence[int | str]]
    objective: Objective
    margin: float
    top: int
    max_price: float | None
    sink: Diagnostics
    progress: Progress | None
    rows: list[PlanRow] = field(default_factory=list[PlanRow])
    values: list[float] = field(default_factory=list[float])
    findings: list[Diagnostics] = field(default_factory=list[Diagnostics])

    def run(self) -> tuple[tuple[PlanRow, ...], PlanProof]:
        """Return the simulated layouts, the best first, and the proof."""
        queue: list[_Entry] = []
        spaces: list[_Space] = []
        failed: dict[int, str] = {}
        for number, machine in enumerate(self.machines):
            candidates = self._candidates(machine, failed)
            if machine.device.main_memory.capacity_bytes < 0:
                message = "the capacity of the memory is unknown: layouts are not checked for memory"
                self.sink.warning("plan.memory-unknown", machine.name, message)
            hidden = Diagnostics()  # every layout would repeat the same messages
            job = StepJob(machine.hardware, STEP_ESTIMATOR, None, "warn", hidden, None, machine.system)
            space = _Space(
                machine, candidates, job, LayoutBounds(job, self.step, machine.devices, machine.device)
            )
            for candidate in candidates:
                space.bounds.register(candidate)
            for index in range(len(candidates)):
                if self.progress and index % 256 == 0:
                    self.progress(index, len(candidates))
                queue.append(self._entry(space, number, index, is_rough=True))
            spaces.append(space)
        if not queue:
            raise UsageError(
                f"no layout of {self.step.name} is valid in this space: "
                f"{failed[max(failed)] if failed else 'no recomputation fits the model'}",
                hint="leave out an option of the search space, or change `devices` or `global_batch`",
            )
        heapify(queue)
        proof = self._simulate(queue, spaces)
        order = sorted(
            range(len(self.rows)),
            key=lambda row: (
                self.rows[row].is_lower_bound, self.values[row], self.rows[row].device_memory_bytes
            ),
        )  # fmt: skip
        if order:
            self.sink.extend(self.findings[order[0]])
        return tuple(self.rows[row] for row in order), proof

    def _entry(self, space: _Space, number: int, index: int, *, is_rough: bool) -> _Entry:
        """Return a layout with its bound. A rough bound does not include recomputation."""
        machine, candidate = space.machine, space.candidates[index]
        bound = space.bounds.bound(candidate, recomputes=not is_rough)
        # a step factor of the device file scales the step and its parts
        least_factor = min([1.0, *(factor.factor for factor in machine.device.step_factors)])
        bound = Bound(*(time_ns * least_factor for time_ns in bound))
        idle_ns = max(bound.step_ns - bound.busy_ns, 0.0)
        work_ns = bound.matmul_ns, bound.busy_ns - bound.matmul_ns, idle_ns
        value = self._value(machine, bound.step_ns, work_ns)
        is_rough &= bool(candidate.training.recompute.modules)
        return _Entry(value, number, index, self._price(machine, bound.step_ns), is_rough)

    def _limit(self, deferred: Sequence[_Entry]) -> float:
        """Return the best value divided by 1 + margin. Steps that are lower bounds only count if there is no
        complete one, and no layout left that may have one.
        """
        pairs = zip(self.values, self.rows, strict=True)
        complete = [value for value, row in pairs if not row.is_lower_bound]
        values = complete or ([] if deferred else self.values)
        return min(values, default=inf) / (1.0 + self.margin)

    def _simulate(self, queue: list[_Entry], spaces: Sequence[_Space]) -> PlanProof:
        """Simulate layouts in the order of their bounds until the best is proven and ``top`` are known.

        Layouts of a machine and an offload whose first step is a lower bound are deferred until another step
        is complete, or until no others are left.
        """
        total, beyond, over_price, simulated = len(queue), 0, 0, 0
        left = self.top * _MOST_MORE
        proven: PlanProof | None = None
        most = inf if self.max_price is None else self.max_price
        deferred: list[_Entry] = []
        may_defer = True
        while queue or deferred:
            if not queue:
                queue, deferred, may_defer = deferred, [], False
                heapify(queue)
            entry = heappop(queue)
            limit = self._limit(deferred)
            if entry.value > limit:
                if proven is None:
                    proven = PlanProof(total, beyond, over_price, len(queue) + 1, simulated, limit)
                left -= 1
                if len(self.rows) >= self.top or left < 0:
                    break
            if entry.price > most:
                over_price += 1
                continue
            space = spaces[entry.space]
            candidate = space.candidates[entry.layout]
            if entry.is_rough:
                heappush(queue, self._entry(space, entry.space, entry.layout, is_rough=False))
                continue
            step = replace(self.step, layout=candidate.layout, training=candidate.training)
            account = step.account().on_device(space.machine.device.kind)
            capacity_bytes = space.machine.device.main_memory.capacity_bytes
            if fits_memory(account.device_memory_bytes, capacity_bytes) is False:
                beyond += 1
                continue
            if self.progress:
                self.progress(simulated, simulated + 1)
            findings = Diagnostics()
            done = replace(space.job, diagnostics=findings).run(step.workload(), None)
            reason = next((finding.message for finding in findings if finding.code == "estimate.missing"), "")
            row = self._row(space.machine, candidate, done, account, reason)
            if row.price_per_million_tokens > most:
                over_price += 1
                continue
            simulated += 1
            self.rows.append(row)
            self.values.append(self._own_value(row))
            self.findings.append(findings)
            if not row.is_lower_bound:
                may_defer = False
                queue, deferred = queue + deferred, []
            elif may_defer:
                kind = entry.space, candidate.training.optimizer_offload
                others = queue
                queue = []
                for other in others:
                    training = spaces[other.space].candidates[other.layout].training
                    is_alike = (other.space, training.optimizer_offload) == kind
                    (deferred if is_alike else queue).append(other)
            heapify(queue)
        return proven or PlanProof(total, beyond, over_price, 0, simulated, self._limit(()))

    def _candidates(self, machine: Machine, failed: dict[int, str]) -> list[Candidate]:
        inner = machine.system.dimensions[0].size if machine.system and machine.system.dimensions else 8
        space = LayoutSpace(
            model=self.step.model,
            devices=machine.devices,
            layout=self.step.layout,
            training=self.step.training,
            domain=min(max(inner, 8), 64),
            axes=self.axes,
        )
        return list(space.candidates(failed))

    def _price(self, machine: Machine, step_ns: float) -> float:
        """Return the price per million tokens; NaN if the price of a device is unknown."""
        tokens = self.step.training.global_batch * self.step.training.seq
        return step_ns / 3.6e12 * machine.devices * machine.terms.price_per_hour / tokens * 1e6

    def _value(self, machine: Machine, step_ns: float, work_ns: tuple[float, float, float]) -> float:
        """Return the value of the objective. ``work_ns`` are the times of a device in matmuls, in other work
        and in waits.
        """
        if self.objective == "time":
            return step_ns
        if self.objective == "price":
            return self._price(machine, step_ns)
        return machine.devices * machine.terms.power.energy_j(machine.terms.tdp_w, work_ns, (nan, nan))[1]

    def _own_value(self, row: PlanRow) -> float:
        by_objective = {"time": row.step_ns, "price": row.price_per_million_tokens, "energy": row.energy_j}
        return by_objective[self.objective]

    def _row(
        self, machine: Machine, candidate: Candidate, done: Simulation, account: Account, reason: str
    ) -> PlanRow:
        """Return the figures of a simulated layout. Times of parts are means over all ranks. ``reason`` is
        the cause of a step that is only a lower bound.
        """
        times = done.device_times()
        low_j, energy_j, high_j = (
            machine.devices * energy
            for energy in machine.terms.power.energy_j(
                machine.terms.tdp_w, times.by_power_ns, done.relative_interval
            )
        )
        return PlanRow(
            settings=candidate.by_name(),
            hardware=machine.name,
            devices=machine.devices,
            link_bandwidth=machine.factor,
            step_ns=done.step_ns,
            step_low_ns=done.interval_ns[0],
            step_high_ns=done.interval_ns[1],
            mfu=done.throughput.mfu,
            tokens_per_s=done.throughput.tokens_per_s,
            peak_memory_bytes=account.peak_memory_bytes,
            device_memory_bytes=account.device_memory_bytes,
            hardware_flops_ratio=account.hardware_flops_per_step / account.model_flops_per_step,
            compute_ns=times.compute_ns,
            exposed_comm_ns=times.exposed_comm_ns,
            bubble_ns=times.idle_ns,
            basis=done.basis_text,
            is_lower_bound=done.is_lower_bound,
            lower_bound_reason=reason if done.is_lower_bound else "",
            price_per_million_tokens=self._price(machine, done.step_ns),
            energy_j=energy_j,
            energy_low_j=low_j,
            energy_high_j=high_j,
        )
