"""Search for the best layout of a training step: bounds of all layouts first, then the engine for some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf, isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np

from hespas.api.arguments import checked, hardware_option
from hespas.api.generators import llm_step
from hespas.api.grid_rows import with_scaled_links
from hespas.api.io import opened_program
from hespas.api.lowering import STEP_ESTIMATOR
from hespas.api.plan_bounds import MATMULS, LayoutBounds
from hespas.api.plan_result import PlanProof, PlanResult, PlanRow
from hespas.api.simulation_job import StepJob
from hespas.api.systems import sized_for
from hespas.generators.llm.model_file import named_model
from hespas.generators.llm.settings import Style
from hespas.generators.llm.space import AXES, Candidate, LayoutSpace
from hespas.graph import Diagnostics, Workload, step_facts
from hespas.graph.errors import UnsupportedError, UsageError, clipped
from hespas.graph.hints import DEVICE, AtLeast, AtMost, NonNegativeInt, Option, PositiveInt
from hespas.graph.progress import Progress
from hespas.graph.workload import Launch
from hespas.hardware import Device, System, load_device
from hespas.hardware.prices import DeviceTerms, Prices, read_prices

if TYPE_CHECKING:
    from hespas.generators.llm import LlmStep
    from hespas.generators.spec import Account
    from hespas.simulator import Simulation

__all__ = ["plan"]

_ObjectiveName = Literal["time", "price", "energy"]
_SPACE, _STEP, _SEARCH = "Search space", "Step", "Search"
"""Headings of ``--help``."""
_MOST_MORE = 50
"""Layouts per wanted row that are tried, after the best one is proven, to fill the list of the next best."""


def _numbers(text: str) -> tuple[int, ...]:
    """Parse a list of whole numbers: ``1,2,4``."""
    parts = [part.strip() for part in str(text).split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise UsageError(
            f"invalid list '{text}': expected whole numbers separated by commas", hint="write 1,2,4"
        )
    return tuple(map(int, parts))


def _factors(text: str) -> tuple[float, ...]:
    """Parse a list of numbers: ``0.5,1,2``."""
    try:
        return tuple(float(part) for part in str(text).split(","))
    except ValueError:
        raise UsageError(
            f"invalid list '{text}': expected numbers separated by commas", hint="write 0.5,1,2"
        ) from None


def _words(text: str) -> tuple[str, ...]:
    """Parse a list of values: ``none,mlp+core_attn`` has two, the second with two modules."""
    return tuple(part.strip().replace("+", ",") for part in str(text).split(","))


def _axis(help_text: str) -> Option:
    return Option(
        f"Search these {help_text}.", metavar="LIST", panel=_SPACE, parse=_numbers, default_text="all"
    )


_Numbers = int | Sequence[int] | None
_Words = str | Sequence[str] | None
_Model = Annotated[
    str,
    Option(
        "Built-in model or model file.",
        metavar="MODEL|FILE.toml",
        completes="models",
        is_argument=True,
        access="reads",
        is_required=False,
    ),
]
_From = Annotated[
    str | Path | Workload | None,
    Option(
        "Take the model, the number format and the tokens per step from a generated workload or its traces.",
        flag="from",
        metavar="SRC",
        panel=_STEP,
        access="reads",
    ),
]
_Devices = Annotated[
    int | Sequence[int],
    Option("Use N devices; a list compares cluster sizes.", metavar="N[,N...]", panel=DEVICE, parse=_numbers),
]
_Hardware = Annotated[
    str | Sequence[str] | None,
    hardware_option("Plan for this device; a list compares devices (default: the device of `system`)."),
]
_System = Annotated[
    "str | Path | System | None",
    Option(
        "Use the network of this system (default: links of the device only).",
        metavar="NAME|FILE",
        panel=DEVICE,
        completes="systems",
        is_text=True,
    ),
]
_Links = Annotated[
    float | Sequence[float],
    Option(
        "Multiply the bandwidth of all links; a list compares factors.",
        metavar="X[,X...]",
        panel=DEVICE,
        parse=_factors,
        default_text="1",
    ),
]
_Seq = Annotated[PositiveInt, Option("Set the sequence length in tokens.", metavar="TOKENS", panel=_STEP)]
_GlobalBatch = Annotated[
    NonNegativeInt, Option("Set sequences per step (0: as in `source`).", metavar="N", panel=_STEP)
]
_Precision = Annotated[
    str,
    Option(
        "Set the precision: bf16, fp16, f32, tf32, fp8-*, mxfp8, nvfp4, int8.", metavar="NAME", panel=_STEP
    ),
]
_Framework = Annotated[Style, Option("Model the kernels of this framework.", panel=_STEP)]
_Launch = Annotated[
    Launch, Option("Launch kernels one by one, partly in CUDA graphs, or as one CUDA graph.", panel=_STEP)
]
_Overlap = Annotated[
    str,
    Option("Overlap communication with computation: none, all, or a list.", metavar="LIST", panel=_STEP),
]
_Capacity = Annotated[
    float, AtLeast(0), Option("Set the capacity factor of experts (0: dropless).", metavar="X", panel=_STEP)
]
_Imbalance = Annotated[
    float,
    AtLeast(1),
    Option("Set the load of the busiest experts relative to the mean.", metavar="X", panel=_STEP),
]
_Recompute = Annotated[
    _Words,
    Option(
        "Search these recomputations: none, selective, full, or modules joined by +.",
        metavar="LIST",
        panel=_SPACE,
        parse=_words,
        default_text="none,selective,full",
    ),
]
_Schedule = Annotated[
    _Words,
    Option(
        "Search these pipeline schedules: gpipe, 1f1b, zero-bubble.",
        metavar="LIST",
        panel=_SPACE,
        parse=_words,
        default_text="1f1b,zero-bubble",
    ),
]
_Offload = Annotated[
    _Words,
    Option(
        "Search these offloads to the host: none, optimizer, or modules joined by +.",
        metavar="LIST",
        panel=_SPACE,
        parse=_words,
        default_text="none",
    ),
]
_Objective = Annotated[
    _ObjectiveName, Option("Minimize the time, the price or the energy of a step.", panel=_SEARCH)
]
_PriceFile = Annotated[
    str | Path | None,
    Option(
        "Read prices per device-hour and power of devices from a TOML file.",
        metavar="FILE",
        panel=_SEARCH,
        access="reads",
    ),
]
_MaxPrice = Annotated[
    float | None,
    AtLeast(0),
    Option("Limit the price per million tokens, in the currency of `prices`.", metavar="X", panel=_SEARCH),
]
_Margin = Annotated[
    float,
    AtLeast(0),
    AtMost(1),
    Option(
        "Prove that no layout is better than the result by more than this share.", metavar="X", panel=_SEARCH
    ),
]
_Top = Annotated[
    int,
    AtLeast(1),
    AtMost(1000),
    Option("Print the N best of the simulated layouts.", metavar="N", panel=_SEARCH),
]


@checked(System="hespas.hardware:System")
def plan(
    model: _Model = "",
    *,
    source: _From = None,
    devices: _Devices,
    hardware: _Hardware = None,
    system: _System = None,
    link_bandwidth: _Links = 1.0,
    seq: _Seq = 4096,
    global_batch: _GlobalBatch = 0,
    precision: _Precision = "bf16",
    framework: _Framework = "megatron",
    launch: _Launch = "kernels",
    overlap: _Overlap = "gradients,parameters,pipeline,context",
    capacity: _Capacity = 0.0,
    imbalance: _Imbalance = 1.0,
    dp: Annotated[_Numbers, _axis("numbers of data-parallel ranks")] = None,
    tp: Annotated[_Numbers, _axis("numbers of tensor-parallel ranks")] = None,
    pp: Annotated[_Numbers, _axis("numbers of pipeline stages")] = None,
    vp: Annotated[_Numbers, _axis("numbers of virtual stages per rank")] = None,
    cp: Annotated[_Numbers, _axis("numbers of context-parallel ranks")] = None,
    ep: Annotated[_Numbers, _axis("numbers of expert-parallel ranks")] = None,
    etp: Annotated[_Numbers, _axis("numbers of tensor-parallel ranks within experts")] = None,
    zero: Annotated[_Numbers, _axis("ZeRO stages")] = None,
    micro_batch: Annotated[_Numbers, _axis("numbers of sequences per micro-batch")] = None,
    recompute: _Recompute = None,
    schedule: _Schedule = None,
    offload: _Offload = None,
    objective: _Objective = "time",
    prices: _PriceFile = None,
    max_price: _MaxPrice = None,
    margin: _Margin = 0.02,
    top: _Top = 10,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> PlanResult:
    """Return the best layouts of a training step, and prove that no layout of the space is better by more
    than ``margin``.

    ``source`` replaces ``model``: a generated training step, of which the model and the tokens per step are
    known. Every layout gets a lower bound (:mod:`hespas.api.plan_bounds`). Layouts are simulated in the order
    of their bounds, if they fit into the memory of the device, until the next bound exceeds the best result.
    Times, intervals and memory are the figures of :func:`hespas.generate` with the same settings.

    Raises ``UsageError`` for unknown names, for an empty space, and for a price that the file does not state,
    and ``UnsupportedError`` for a ``source`` whose layout cannot be changed.

    Examples:
        >>> hespas.plan("llama-3-8b", devices=8, hardware="H100-SXM", global_batch=8, pp=1, cp=1, zero=1)
        <PlanResult: Llama-3-8B on 8 H100-SXM: 386.663 ms with dp 8, zero 1>
    """
    from hespas.generators.llm import LlmStep

    given = dict(locals())
    sink = diagnostics if diagnostics is not None else Diagnostics()
    own_prices = Prices(rows={}) if prices is None else read_prices(Path(prices))
    if max_price is not None and prices is None:
        raise UsageError("`max_price` requires `prices`", hint="add `prices=FILE`")
    if bool(model) == (source is not None):
        raise UsageError(
            "either a model or `source` is required", hint="name a model: hespas generate llm --list"
        )
    if source is not None:
        _, workload = opened_program(source, None, None, sink)
        model, global_batch = _recovered(workload, seq, global_batch)
    if not global_batch:
        raise UsageError("`global_batch` is required", hint="`global_batch=256`")
    step = llm_step(
        model, seq=seq, global_batch=global_batch, precision=precision, framework=framework, launch=launch,
        capacity=capacity, imbalance=imbalance, overlap=overlap,
    )  # fmt: skip
    assert isinstance(step, LlmStep)
    axes: dict[str, Sequence[int | str]] = {}
    for name in AXES:
        values = given[name]
        if values is not None:
            listed = [values] if isinstance(values, int | str) else list(values)
            axes[name] = ["" if name == "offload" and value == "none" else value for value in listed]
    with TemporaryDirectory(prefix="hespas-plan-") as folder:
        machines = _machines(
            given, own_prices, Path(folder), needs_price=objective == "price" or max_price is not None
        )
        search = _Search(step, machines, axes, objective, margin, top, max_price, progress)
        rows, proof = search.run()
    return PlanResult(
        model=step.name,
        objective=objective,
        margin=margin,
        rows=rows,
        proof=proof,
        inputs=tuple(str(path) for path in (prices, source) if isinstance(path, str | Path)),
        currency=own_prices.currency if prices is not None else "",
        sources=_sources(machines, priced=prices is not None),
        diagnostics=sink,
    )


def _recovered(workload: Workload, seq: int, global_batch: int) -> tuple[str, int]:
    """Return the name of the model of a generated training step, and its sequences per step.

    Raises ``UnsupportedError`` for a workload whose layout cannot be changed: a recording or a captured
    program, and a generated step of a model that is not built in.
    """
    facts = step_facts(workload.metadata)
    hint = "name the model instead: hespas plan MODEL; `hespas generate llm --list` lists the built-in ones"
    if facts is None or facts.kind != "training":
        raise UnsupportedError(
            f"{workload.name or 'the workload'} does not state a training step of a language model: its "
            "layers cannot be divided in another way",
            hint=hint,
        )
    try:
        named_model(workload.name)
    except UsageError as error:
        raise UnsupportedError(f"no built-in model is named {clipped(workload.name)!r}", hint=hint) from error
    if global_batch:
        return workload.name, global_batch
    sequences, rest = divmod(facts.tokens, seq) if facts.tokens > 0 else (0.0, 1.0)
    if rest or not sequences:
        raise UsageError(
            f"{facts.tokens:,.0f} tokens per step are not whole sequences of {seq:,} tokens",
            hint="give `seq` and `global_batch` of the step",
        )
    return workload.name, int(sequences)


class _Machine(NamedTuple):
    """Cluster that layouts are planned for."""

    name: str
    hardware: str
    device: Device
    devices: int
    system: System | None
    factor: float
    terms: DeviceTerms


def _machines(given: Mapping[str, Any], prices: Prices, folder: Path, *, needs_price: bool) -> list[_Machine]:
    """Return every combination of devices, numbers of devices and link factors."""
    sizes, factors = given["devices"], given["link_bandwidth"]
    sizes = [sizes] if isinstance(sizes, int) else list(dict.fromkeys(sizes))
    factors = [factors] if isinstance(factors, int | float) else list(dict.fromkeys(factors))
    if min(sizes) < 1:
        raise UsageError(f"`devices={min(sizes)}` is less than 1", hint="`devices=8`")
    if not all(1e-9 <= factor <= 1e9 for factor in factors):
        raise UsageError("`link_bandwidth` is not from 1e-9 to 1e9", hint="`link_bandwidth=2`")
    names = given["hardware"]
    names = [names] if isinstance(names, str) else list(names or ())
    if not names:
        sized = sized_for(given["system"], min(sizes))
        if sized is None:
            raise UsageError("`hardware` or `system` is required", hint="`hardware=H100-SXM`")
        names = [sized.device]
    machines: list[_Machine] = []
    for name in names:
        device = load_device(name)
        terms = prices.of_device(device)
        if needs_price and isnan(terms.price_per_hour):
            raise UsageError(
                f"the price of a {device.name}-hour is unknown",
                path=prices.path or None,
                hint=f'write a row [[device]] with name = "{device.name}" and price_per_hour, and name the '
                "file by `prices`",
            )
        for size in sizes:
            for factor in factors:
                arguments: dict[str, Any] = {"hardware": name}
                if given["system"] is not None:
                    arguments["system"] = given["system"]
                if factor != 1:
                    own = folder / f"{len(machines)}"
                    own.mkdir()
                    arguments |= with_scaled_links(arguments, factor, own)
                sized = sized_for(arguments.get("system"), size)
                machines.append(
                    _Machine(device.name, arguments["hardware"], device, size, sized, factor, terms)
                )
    return machines


def _sources(machines: Sequence[_Machine], *, priced: bool) -> tuple[str, ...]:
    """Return what prices and energies rest on, one sentence per device."""
    texts: dict[str, None] = {}
    for machine in machines:
        if priced and not isnan(machine.terms.price_per_hour):
            texts[f"price of {machine.name}: {machine.terms.price_source}"] = None
        if not isnan(machine.terms.tdp_w):
            texts[f"power of {machine.name}: {machine.terms.power_source}"] = None
    return tuple(texts)


class _Space(NamedTuple):
    """Layouts of one machine, with their simulator and bounds."""

    machine: _Machine
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
class _Search:
    """Best-first search over the layouts of all machines."""

    step: LlmStep
    machines: Sequence[_Machine]
    axes: Mapping[str, Sequence[int | str]]
    objective: _ObjectiveName
    margin: float
    top: int
    max_price: float | None
    progress: Progress | None
    rows: list[PlanRow] = field(default_factory=list[PlanRow])
    values: list[float] = field(default_factory=list[float])

    def run(self) -> tuple[tuple[PlanRow, ...], PlanProof]:
        """Return the simulated layouts, the best first, and the proof."""
        queue: list[_Entry] = []
        spaces: list[_Space] = []
        for number, machine in enumerate(self.machines):
            candidates = self._candidates(machine)
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
                f"no layout of {self.step.name} is valid in this space",
                hint="leave out an option of the search space, or change `devices` or `global_batch`",
            )
        heapify(queue)
        return self._simulate(queue, spaces)

    def _entry(self, space: _Space, number: int, index: int, *, is_rough: bool) -> _Entry:
        """Return a layout with its bound. A rough bound does not include recomputation."""
        machine, candidate = space.machine, space.candidates[index]
        bound = space.bounds.bound(candidate, recomputes=not is_rough)
        idle_ns = max(bound.step_ns - bound.busy_ns, 0.0)
        work_ns = bound.matmul_ns, bound.busy_ns - bound.matmul_ns, idle_ns
        value = self._value(machine, bound.step_ns, work_ns)
        is_rough &= bool(candidate.training.recompute.modules)
        return _Entry(value, number, index, self._price(machine, bound.step_ns), is_rough)

    def _simulate(
        self, queue: list[_Entry], spaces: Sequence[_Space]
    ) -> tuple[tuple[PlanRow, ...], PlanProof]:
        """Simulate layouts in the order of their bounds until the best is proven and ``top`` are known."""
        total, beyond, dear, simulated = len(queue), 0, 0, 0
        left = self.top * _MOST_MORE
        proven: PlanProof | None = None
        most = inf if self.max_price is None else self.max_price
        while queue:
            entry = heappop(queue)
            limit = min(self.values, default=inf) / (1.0 + self.margin)
            if entry.value > limit:
                if proven is None:
                    proven = PlanProof(total, beyond, dear, len(queue) + 1, simulated, limit)
                left -= 1
                if len(self.rows) >= self.top or left < 0:
                    break
            if entry.price > most:
                dear += 1
                continue
            space = spaces[entry.space]
            candidate = space.candidates[entry.layout]
            if entry.is_rough:
                heappush(queue, self._entry(space, entry.space, entry.layout, is_rough=False))
                continue
            step = replace(self.step, layout=candidate.layout, training=candidate.training)
            account = step.account()
            capacity = space.machine.device.main_memory.capacity_bytes
            if 0 <= capacity < account.peak_memory_bytes:
                beyond += 1
                continue
            if self.progress:
                self.progress(simulated, simulated + 1)
            done = space.job.run(step.workload(), None)
            simulated += 1
            row = self._row(space.machine, candidate, done, account)
            if row.price_per_million_tokens > most:
                dear += 1
                continue
            self.rows.append(row)
            self.values.append(self._own_value(row))
        best = min(self.values, default=inf)
        proof = proven or PlanProof(total, beyond, dear, 0, simulated, best / (1.0 + self.margin))
        order = sorted(
            range(len(self.rows)), key=lambda row: (self.values[row], self.rows[row].peak_memory_bytes)
        )
        return tuple(self.rows[row] for row in order), proof

    def _candidates(self, machine: _Machine) -> list[Candidate]:
        inner = machine.system.dimensions[0].size if machine.system and machine.system.dimensions else 8
        space = LayoutSpace(
            model=self.step.model,
            devices=machine.devices,
            layout=self.step.layout,
            training=self.step.training,
            domain=min(max(inner, 8), 64),
            axes=self.axes,
        )
        return list(space.candidates())

    def _price(self, machine: _Machine, step_ns: float) -> float:
        """Return the price per million tokens; NaN if the price of a device is unknown."""
        tokens = self.step.training.global_batch * self.step.training.seq
        return step_ns / 3.6e12 * machine.devices * machine.terms.price_per_hour / tokens * 1e6

    def _value(self, machine: _Machine, step_ns: float, work_ns: tuple[float, float, float]) -> float:
        """Return the value of the objective. ``work_ns`` are the times of a device in matmuls, in other work
        and in waits.
        """
        if self.objective == "time":
            return step_ns
        if self.objective == "price":
            return self._price(machine, step_ns)
        return machine.devices * machine.terms.power.energy_j(machine.terms.tdp_w, *work_ns)[1]

    def _own_value(self, row: PlanRow) -> float:
        by_objective = {"time": row.step_ns, "price": row.price_per_million_tokens, "energy": row.energy_j}
        return by_objective[self.objective]

    def _row(self, machine: _Machine, candidate: Candidate, done: Simulation, account: Account) -> PlanRow:
        """Return the figures of a simulated layout. Times of parts are means over all ranks."""
        line = done.timeline
        compute_ns = float(np.nanmean(line.resource_ns("compute")))
        exposed_ns = float(np.nanmean(line.exposed_comm_ns))
        shares = np.bincount(line.shown_by[line.shown_by >= 0], minlength=len(line.shown_by))
        matmul_ns = 0.0
        for number, graph in enumerate(done.workload.classes):
            mine = (line.node >= 0) & (done.workload.rank_class[line.rank] == number)
            mine &= line.resource == line.resources.index("compute")
            mine[mine] = np.isin(graph.op_class[line.node[mine]], MATMULS)
            matmul_ns += float(((line.end_ns - line.start_ns) * line.trips * shares[line.rank])[mine].sum())
        matmul_ns = min(matmul_ns / max(int(shares.sum()), 1), compute_ns)
        busy_ns = compute_ns - matmul_ns + exposed_ns
        idle_ns = max(done.step_ns - compute_ns - exposed_ns, 0.0)
        low_j, energy_j, high_j = (
            machine.devices * energy
            for energy in machine.terms.power.energy_j(machine.terms.tdp_w, matmul_ns, busy_ns, idle_ns)
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
            hardware_flops_ratio=account.hardware_flops_per_step / account.model_flops_per_step,
            compute_ns=compute_ns,
            exposed_comm_ns=exposed_ns,
            bubble_ns=idle_ns,
            is_lower_bound=done.is_lower_bound,
            price_per_million_tokens=self._price(machine, done.step_ns),
            energy_j=energy_j,
            energy_low_j=low_j,
            energy_high_j=high_j,
        )
