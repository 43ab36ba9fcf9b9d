"""Search for the best layout of a training step: bounds of all layouts first, then the engine for some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from hespas.api.arguments import checked, hardware_option
from hespas.api.generators import (
    ExpertCapacity,
    ExpertImbalance,
    GradientPrecision,
    LlmModel,
    StepFramework,
    StepLaunch,
    StepOverlap,
    StepPrecision,
    llm_step,
)
from hespas.api.grid_rows import with_scaled_links
from hespas.api.io import opened_program
from hespas.api.plan_result import PlanResult
from hespas.api.plan_search import LayoutSearch, Machine, Objective
from hespas.api.systems import sized_for
from hespas.generators.llm.model import Attention, Mlp
from hespas.generators.llm.model_file import named_model
from hespas.generators.llm.space import AXES
from hespas.generators.llm.step import training_facts
from hespas.graph import Diagnostics, Workload, step_facts
from hespas.graph.errors import UnsupportedError, UsageError, clipped
from hespas.graph.hints import DEVICE, AtLeast, AtMost, NonNegativeInt, Option
from hespas.graph.progress import Progress
from hespas.graph.workload import StepFacts
from hespas.hardware import Device, System, load_device
from hespas.hardware.prices import Prices, read_prices

if TYPE_CHECKING:
    from hespas.generators.llm import LlmStep, Model

__all__ = ["plan"]

_SEQ = 4096
"""Default sequence length [tokens]."""
_SPACE, _STEP, _SEARCH = "Search space", "Step", "Search"
"""Headings of ``--help``."""


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
_From = Annotated[
    str | Path | Workload | None,
    Option(
        "Take the model and the tokens per step from a generated workload, or from a program or trace of one "
        "device with exactly the matmuls of a dense decoder.",
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
_Sequence = Annotated[
    NonNegativeInt,
    Option(
        "Set the sequence length in tokens (0: as in `source`, else 4096).", metavar="TOKENS", panel=_STEP
    ),
]
_GlobalBatch = Annotated[
    NonNegativeInt, Option("Set sequences per step (0: as in `source`).", metavar="N", panel=_STEP)
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
    Objective, Option("Minimize the time, the price or the energy of a step.", panel=_SEARCH)
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


@checked(Model="hespas.generators.llm:Model", System="hespas.hardware:System")
def plan(
    model: LlmModel = "",
    *,
    source: _From = None,
    devices: _Devices,
    hardware: _Hardware = None,
    system: _System = None,
    link_bandwidth: _Links = 1.0,
    seq: _Sequence = 0,
    global_batch: _GlobalBatch = 0,
    precision: StepPrecision = "bf16",
    gradient_precision: GradientPrecision = "f32",
    framework: StepFramework = "megatron",
    launch: StepLaunch = "kernels",
    overlap: StepOverlap = "gradients,parameters,tensor_backward,pipeline,context",
    capacity: ExpertCapacity = 0.0,
    imbalance: ExpertImbalance = 1.0,
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

    ``source`` replaces ``model``: a generated training step, whose name selects the model, or a program or a
    recorded step of one device, whose matmuls determine the sizes of a dense decoder
    (:mod:`hespas.generators.llm.recognition`). Every layout gets a lower bound
    (:mod:`hespas.api.plan_bounds`). Layouts are simulated in the order of their bounds, if they fit into the
    memory of the device, until the next bound exceeds the best result. Times, intervals and memory are the
    figures of :func:`hespas.generate` with the same settings.

    Raises ``UsageError`` for unknown names, for an empty space, and for a price that the file does not state,
    and ``UnsupportedError`` for a ``source`` whose layout cannot be changed.

    Examples:
        >>> hespas.plan("llama-3-8b", devices=8, hardware="H100-SXM", global_batch=8, pp=1, cp=1, zero=1)
        <PlanResult: Llama-3-8B on 8 H100-SXM: 386.668 ms with dp 8, zero 1>
    """
    from hespas.generators.llm import LlmStep

    given = dict(locals())
    sink = diagnostics if diagnostics is not None else Diagnostics()
    own_devices = _devices(given)
    own_prices = Prices(rows={}) if prices is None else read_prices(Path(prices), own_devices.values())
    if max_price is not None and prices is None:
        raise UsageError("`max_price` requires `prices`", hint="add `prices=FILE`")
    if model and source is not None:
        raise UsageError("give a model or `source`, not both", hint="leave one of them out")
    if not model and source is None:
        raise UsageError("a model or `source` is required", hint="name a model: hespas generate llm --list")
    chosen: str | Model = model
    facts: StepFacts | None = None
    if source is not None:
        chosen, seq, global_batch, facts = _source_model(source, seq, global_batch, precision, sink)
    if "microbatches" in overlap.split(","):
        raise UnsupportedError(
            "layouts whose token dispatch overlaps another micro-batch have no lower bound",
            hint="leave microbatches out of `overlap`",
        )
    if not global_batch:
        raise UsageError("`global_batch` is required", hint="`global_batch=256`")
    step = llm_step(
        chosen, seq=seq or _SEQ, global_batch=global_batch, framework=framework, launch=launch,
        precision=precision, gradient_precision=gradient_precision, capacity=capacity, imbalance=imbalance,
        overlap=overlap,
    )  # fmt: skip
    assert isinstance(step, LlmStep)
    if facts is not None:
        _check_facts(facts, step)
    axes: dict[str, Sequence[int | str]] = {}
    for name in AXES:
        values = given[name]
        if values is not None:
            listed = [values] if isinstance(values, int | str) else list(values)
            axes[name] = ["" if name == "offload" and value == "none" else value for value in listed]
    with TemporaryDirectory(prefix="hespas-plan-") as folder:
        machines = _machines(
            given,
            own_devices,
            own_prices,
            Path(folder),
            needs_price=objective == "price" or max_price is not None,
        )
        search = LayoutSearch(step, machines, axes, objective, margin, top, max_price, sink, progress)
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


def _source_model(
    source: str | Path | Workload, seq: int, global_batch: int, precision: str, diagnostics: Diagnostics
) -> tuple[str | Model, int, int, StepFacts | None]:
    """Return the model of a generated training step or of a program of one device, its sequence length, its
    sequences per step, and the facts of a generated step.

    Raises ``UnsupportedError`` for a step of serving, and for a generated step whose model is not built in.
    """
    _, workload = opened_program(source, None, None, diagnostics)
    facts = step_facts(workload.metadata)
    if facts is None:
        return *_program_model(workload, seq, global_batch, precision, diagnostics), None
    hint = "name the model instead: hespas plan MODEL; `hespas generate llm --list` lists the built-in ones"
    if facts.kind != "training":
        raise UnsupportedError(f"{clipped(workload.name)} is not a training step of an LLM", hint=hint)
    try:
        named_model(workload.name)
    except UsageError as error:
        raise UnsupportedError(f"no built-in model is named {clipped(workload.name)!r}", hint=hint) from error
    seq = seq or _SEQ
    return workload.name, seq, global_batch or _whole_sequences(facts.tokens, seq), facts


def _whole_sequences(tokens: float, seq: int) -> int:
    sequences, rest = divmod(tokens, seq) if tokens > 0 else (0.0, 1.0)
    if rest or not sequences:
        raise UsageError(
            f"{tokens:,.0f} tokens per step are not whole sequences of {seq:,} tokens",
            hint="give `seq` and `global_batch` of the step",
        )
    return int(sequences)


def _program_model(
    workload: Workload, seq: int, global_batch: int, precision: str, diagnostics: Diagnostics
) -> tuple[Model, int, int]:
    """Return the model whose matmuls a program of one device has, its sequence length and its sequences per
    step.

    Raises ``UnsupportedError`` for a program of several devices and for another kind of model, and
    ``UsageError`` if the program does not determine the number of sequences.
    """
    from hespas.generators.llm.recognition import recognised_step

    name = clipped(workload.name) or "the program"
    if workload.num_ranks != 1:
        raise UnsupportedError(
            f"{name} is a program of {workload.num_ranks:,} devices: its weights may be divided already",
            hint="capture the program for one device, or name the model: hespas plan MODEL",
        )
    found = recognised_step(workload.classes[0])
    if not found.trains and not global_batch:
        raise UsageError(f"{name} computes no gradients", hint="give `global_batch` of the training step")
    attention, mlp = found.model.layers[0]
    assert isinstance(attention, Attention)
    assert isinstance(mlp, Mlp)
    matmuls = "" if found.dtype == precision else f"; its matmuls are in {found.dtype or 'an unknown type'}"
    mlp_text = f"{'gated ' if mlp.gated else ''}MLP of {mlp.ffn:,}"
    diagnostics.warning(
        "plan.recognised-model",
        name,
        f"recognised {len(found.model.layers):,} layers of {found.model.hidden:,}, {attention.heads:,} heads "
        f"of {attention.head_dim:,} with {attention.kv_heads:,} key heads, {mlp_text}, "
        f"vocabulary {found.model.vocab:,}, {found.global_batch:,} x {found.seq:,} tokens{matmuls}; "
        "assumed causal attention, RMS norms, rotary embeddings, no biases, and a head with its own weights",
    )
    seq = seq or found.seq
    return found.model, seq, global_batch or _whole_sequences(found.global_batch * found.seq, seq)


def _check_facts(facts: StepFacts, step: LlmStep) -> None:
    """Compare a step with the facts of the workload whose name selected its model. Files can be renamed.

    Raises ``UnsupportedError`` if FLOPs per token differ by more than 1 %, and ``UsageError`` for another
    element type of matmuls.
    """
    own = training_facts(step.model, step.training)
    recorded, expected = facts.model_flops / facts.tokens, own.model_flops / own.tokens
    if not abs(recorded - expected) <= 0.01 * expected:
        raise UnsupportedError(
            f"the step has {recorded:.4g} FLOPs per token, {step.name} with sequences of "
            f"{step.training.seq:,} tokens has {expected:.4g}: the name or `seq` is not that of the step",
            hint="give `seq` of the step, or name the model instead of `source`",
        )
    if facts.dtype != own.dtype:
        raise UsageError(
            f"the step has matmuls in {facts.dtype or 'an unknown type'}, not in {own.dtype}",
            hint="give `precision` of the step, or name the model instead of `source`",
        )


def _devices(given: Mapping[str, Any]) -> dict[str, Device]:
    """Return the devices by name or file, by default the device of the system."""
    names = given["hardware"]
    names = [names] if isinstance(names, str) else list(names or ())
    if not names:
        sized = sized_for(given["system"], 1) if given["hardware"] is None else None
        if sized is None:
            raise UsageError("`hardware` or `system` is required", hint="`hardware=H100-SXM`")
        names = [sized.device]
    devices: dict[str, Device] = {}
    for name in names:
        device = load_device(name)
        if device not in devices.values():  # a name and its alias are one device
            devices[name] = device
    return devices


def _machines(
    given: Mapping[str, Any],
    devices: Mapping[str, Device],
    prices: Prices,
    folder: Path,
    *,
    needs_price: bool,
) -> list[Machine]:
    """Return every combination of devices, numbers of devices and link factors."""
    sizes, factors = given["devices"], given["link_bandwidth"]
    sizes = [sizes] if isinstance(sizes, int) else list(dict.fromkeys(sizes))
    factors = [factors] if isinstance(factors, int | float) else list(dict.fromkeys(factors))
    if not sizes or min(sizes) < 1:
        raise UsageError(f"`devices={min(sizes, default='')}`: expected 1 or more", hint="`devices=8`")
    if not factors:
        raise UsageError("`link_bandwidth` has no values", hint="`link_bandwidth=1`")
    if not all(1e-9 <= factor <= 1e9 for factor in factors):
        raise UsageError("`link_bandwidth` is not from 1e-9 to 1e9", hint="`link_bandwidth=2`")
    machines: list[Machine] = []
    for name, device in devices.items():
        terms = prices.of_device(device)
        if needs_price and isnan(terms.price_per_hour):
            raise prices.unknown(device, "price per device-hour", "price_per_hour")
        if given["objective"] == "energy" and isnan(terms.tdp_w):
            raise prices.unknown(device, "thermal design power", "tdp_w")
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
                    Machine(device.name, arguments["hardware"], device, size, sized, factor, terms)
                )
    return machines


def _sources(machines: Sequence[Machine], *, priced: bool) -> tuple[str, ...]:
    """Return what prices and energies rest on, one sentence per device."""
    texts: dict[str, None] = {}
    for machine in machines:
        if priced and not isnan(machine.terms.price_per_hour):
            texts[f"price of {machine.name}: {machine.terms.price_source}"] = None
        if not isnan(machine.terms.tdp_w):
            texts[f"power of {machine.name}: {machine.terms.power_source}"] = None
    return tuple(texts)
