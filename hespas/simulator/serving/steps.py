"""How long a step of serving takes: estimates at the points of a lattice, and what lies between them.

A step works on ``tokens`` of which some are sampled, decodes some sequences and works on some prompts. Its
kernels run one after the other, so its time is a sum: what depends on the tokens, the head, attention of
those that decode, and attention of the prompts. Between grid points times are linear in each size, as
kernels are between two sizes of the same number of tiles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from hespas.estimators.interface import OperationModel, operations_on, predict_with
from hespas.estimators.registry import load_estimator
from hespas.graph import Diagnostics, OpClass, OpGraph
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device
from hespas.operations import Labels, Operations

__all__ = [
    "SHARES",
    "Asked",
    "Correction",
    "LatticeKernels",
    "StepGrids",
    "StepTimes",
    "models_of",
    "step_times",
]

_DECODED, _PROMPTED = 256.0, 2048.0
"""Steps of so few tokens run the kernels of decoding, of so many those of prompts."""
SHARES = ("products", "experts", "attention", "collectives", "others")
"""What the time of a step is made of. Products of experts are grouped and run on kernels of their own."""


class StepGrids(Protocol):
    """Ascending grid points of the sizes of a step."""

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens of a step."""
        ...

    @property
    def rows(self) -> Sequence[int]:
        """Tokens that are sampled."""
        ...

    @property
    def batch(self) -> Sequence[int]:
        """Sequences that decode."""
        ...

    @property
    def context(self) -> Sequence[int]:
        """Tokens of each in the cache."""
        ...

    @property
    def prompts(self) -> Sequence[int]:
        """Prompts of a step."""
        ...

    @property
    def length(self) -> Sequence[int]:
        """New tokens of each."""
        ...

    @property
    def before(self) -> Sequence[int]:
        """Tokens before them."""
        ...


class LatticeKernels(Protocol):
    """Kernels of all grid points: ``times[i]`` executions of ``node[i]`` are part of point ``point[i]`` of
    part ``part[i]`` of (tokens, rows, decode, prompts).
    """

    @property
    def grids(self) -> StepGrids:
        """The grid points."""
        ...

    @property
    def graph(self) -> OpGraph:
        """All kernels."""
        ...

    @property
    def node(self) -> IntArray:
        """Nodes of the graph."""
        ...

    @property
    def part(self) -> IntArray:
        """Which part of a step they are of."""
        ...

    @property
    def point(self) -> IntArray:
        """Which point of the part."""
        ...

    @property
    def times(self) -> FloatArray:
        """How often they run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What estimates of kernels alone do not know of a serving stack: factors on the time of each of
    :data:`SHARES`, time of the host that each step and each of its sequences waits for [ns], and time of a
    request outside of steps (tokenizer, transport) [ns]. ``launch_ns``: the host takes so long to launch a
    kernel; steps that work on prompts are no shorter than their kernels' launches, where those that only
    decode are launched as one graph. ``routed``: products of experts take so many times as long as others.
    ``prefill``: kernels that work on prompts take so many times as long as those that decode, beside their
    factors, and products of experts ``experts`` times as long as that. ``accepts``: how likely a guessed
    token is right.
    """

    products: float = 1.0
    attention: float = 1.0
    collectives: float = 1.0
    others: float = 1.0
    step_ns: float = 0.0
    sequence_ns: float = 0.0
    prompt_ns: float = 0.0
    request_ns: float = 0.0
    launch_ns: float = 0.0
    routed: float = 1.0
    prefill: float = 1.0
    experts: float = 1.0
    accepts: float = 0.8

    @property
    def factors(self) -> FloatArray:
        """Those of :data:`SHARES`, shape ``(shares,)``."""
        experts = self.products * self.routed
        return np.array([self.products, experts, self.attention, self.collectives, self.others])


@dataclass(frozen=True, eq=False)
class StepTimes:
    """Times at grid points [ns], of each of :data:`SHARES` in the first dimension: ``of_tokens`` and
    ``of_rows`` of shape ``(shares, points)``, ``of_decode`` of ``(shares, batch, context)``, ``of_prompts``
    of ``(shares, prompts, length, before)``. ``kernels``: launches of a step that works on prompts, unless it
    has at most ``captured`` tokens, for which there are graphs, too. ``drafts``: tokens of each sequence that
    a step guesses beside the next, by further layers that take ``draft_share`` as long as the model.
    """

    grids: StepGrids
    of_tokens: FloatArray
    of_rows: FloatArray
    of_decode: FloatArray
    of_prompts: FloatArray
    correction: Correction = Correction()
    kernels: float = 0.0
    captured: int = 0
    drafts: int = 0
    draft_share: float = 0.0

    @property
    def queries(self) -> int:
        """Tokens of a sequence that decodes in a step."""
        return 1 + self.drafts

    @property
    def gain(self) -> float:
        """Tokens that a sequence gets of a step: guesses count up to the first that is wrong."""
        return float(sum(self.correction.accepts**place for place in range(self.queries)))

    def corrected(self, correction: Correction) -> StepTimes:
        """The same estimates of another stack."""
        return replace(self, correction=correction)

    @cached_property
    def _tables(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        factors = self.correction.factors
        tables = (self.of_rows, self.of_decode, self.of_prompts)
        second, third, fourth = (np.tensordot(factors, each, axes=1) for each in tables)
        tokens = np.log2(np.array(self.grids.tokens) / _DECODED) / np.log2(_PROMPTED / _DECODED)
        part, prefill = np.clip(tokens, 0.0, 1.0), self.correction.prefill
        of_tokens = self.of_tokens * factors[:, None]
        of_tokens[SHARES.index("experts")] *= self.correction.experts**part
        return of_tokens.sum(axis=0) * prefill**part, second, third, fourth * prefill

    @cached_property
    def _axes(self) -> dict[str, FloatArray]:
        names = ("tokens", "rows", "batch", "context", "prompts", "length", "before")
        return {name: np.array(getattr(self.grids, name), np.float64) for name in names}

    @cached_property
    def _points(self) -> dict[str, tuple[float, ...]]:
        """The axes as Python's numbers, which single values are looked up in faster."""
        return {name: tuple(axis.tolist()) for name, axis in self._axes.items()}

    @cached_property
    def _lines_of_tokens(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The first two tables as Python's numbers."""
        by_tokens, by_rows = self._tables[:2]
        return tuple(by_tokens.tolist()), tuple(by_rows.tolist())

    def decode_ns(self, batch: int, context: FloatArray) -> FloatArray:
        """Steps in which ``batch`` sequences decode, with so many tokens each in the mean, [ns]."""
        decoded = self._decoded_by(batch)
        return decoded.fixed_ns + _lines(self._axes["context"], decoded.row, context)

    @cached_property
    def _known_batches(self) -> dict[int, _Decoded]:
        return {}

    @cached_property
    def _known_prompts(self) -> dict[int, list[list[float]]]:
        return {}

    def _decoded_by(self, batch: int) -> _Decoded:
        """Return the times of so many sequences by their tokens."""
        known = self._known_batches.get(batch)
        if known is None:
            row = _row(self._points["batch"], self._tables[2], float(batch))
            fixed = self._of_decoded(batch, batch * self.queries) + self._sampled_ns(batch * self.queries)
            fixed += self.correction.step_ns + self.correction.sequence_ns * batch
            known = self._known_batches[batch] = _Decoded(row, tuple(row.tolist()), fixed)
        return known

    def _prompted_ns(self, prompts: int, length: float, before: float) -> float:
        """Return the time of prompts of so many new tokens each behind others."""
        plane = self._known_prompts.get(prompts)
        if plane is None:
            plane = _row(self._points["prompts"], self._tables[3], prompts).tolist()
            self._known_prompts[prompts] = plane
        axis = self._points["length"]
        if len(axis) == 1:
            return _line(self._points["before"], plane[0], before)
        at, part = _place(axis, length)
        low, high, part = plane[at], plane[at + 1], max(part, 0.0)
        first, further = _place(self._points["before"], before)
        time = low[first] + part * (high[first] - low[first])
        if len(low) == 1:
            return time
        following = low[first + 1] + part * (high[first + 1] - low[first + 1])
        return time + max(further, 0.0) * (following - time)

    def step_ns(
        self, *, batch: int, context: float, prompts: int, new_tokens: int, before: float, sampled: int
    ) -> float:
        """A step in which ``batch`` sequences of ``context`` tokens each decode, and ``prompts`` have
        ``new_tokens`` together, behind ``before`` tokens each in the mean. ``sampled`` tokens come of it.
        """
        tokens = batch * self.queries + new_tokens
        time = self._of_decoded(batch, tokens)
        time += self._sampled_ns(max(sampled + batch * self.drafts, 1))
        if batch:
            time += _interpolated(self._points["context"], self._decoded_by(batch).values, context)
        if prompts:
            time += self._prompted_ns(prompts, new_tokens / prompts, before)
            if tokens > self.captured:
                time = _overlapped(time, self.correction.launch_ns * self.kernels)
        host = self.correction.step_ns + self.correction.sequence_ns * batch
        return time + host + self.correction.prompt_ns * prompts

    def _of_decoded(self, batch: int, tokens: int) -> float:
        """What depends on the tokens of a step, and what guesses for ``batch`` sequences take."""
        axis, table = self._points["tokens"], self._lines_of_tokens[0]
        time = _line(axis, table, float(tokens))
        if self.drafts and batch:
            guess = self.draft_share * _line(axis, table, float(batch)) + self._sampled_ns(batch)
            time += self.drafts * guess
        return time

    def _sampled_ns(self, rows: int) -> float:
        return _line(self._points["rows"], self._lines_of_tokens[1], float(rows))


def _overlapped(device_ns: float, host_ns: float) -> float:
    """Both at once take as long as the longer, and more where they are alike: each waits at times."""
    if not host_ns:
        return device_ns
    return float((device_ns**_OVERLAP + host_ns**_OVERLAP) ** (1 / _OVERLAP))


_OVERLAP = 4


def _place(axis: Sequence[float], value: float) -> tuple[int, float]:
    """The grid point at or before a value and how far it is to the next; beyond the ends lines go on."""
    if len(axis) == 1:
        return 0, 0.0
    at = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return at, (value - axis[at]) / (axis[at + 1] - axis[at])


def _row(axis: Sequence[float], table: FloatArray, value: float) -> FloatArray:
    """The table at a value of its first dimension; below the first grid point it is that of the first."""
    at, part = _place(axis, value)
    part = max(part, 0.0)
    if len(axis) == 1:
        return np.asarray(table[0], np.float64)
    return np.asarray(table[at] + part * (table[at + 1] - table[at]), np.float64)


def _line(axis: Sequence[float], values: Sequence[float], value: float) -> float:
    """The value of a table of one dimension, as :func:`_row` has it."""
    at, part = _place(axis, value)
    if len(axis) == 1:
        return values[0]
    return values[at] + max(part, 0.0) * (values[at + 1] - values[at])


def _lines(axis: FloatArray, values: FloatArray, at: FloatArray) -> FloatArray:
    """Values on one axis, the last piece going on."""
    if len(axis) == 1:
        return np.full(len(at), values[0])
    inside: FloatArray = np.interp(at, axis, values)
    if at.max(initial=0.0) <= axis[-1]:
        return inside
    slope = (values[-1] - values[-2]) / (axis[-1] - axis[-2])
    return np.asarray(inside + slope * np.maximum(at - axis[-1], 0.0), np.float64)


def _interpolated(axis: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return what :func:`_lines` says of one value, by the arithmetic of ``numpy.interp``."""
    if len(axis) == 1 or at <= axis[0]:
        return values[0]
    place = min(bisect_right(axis, at), len(axis) - 1) - 1
    slope = (values[place + 1] - values[place]) / (axis[place + 1] - axis[place])
    if at < axis[-1]:
        return slope * (at - axis[place]) + values[place]
    return values[-1] + slope * (at - axis[-1])


class _Decoded(NamedTuple):
    """Times of sequences that decode by their tokens, as an array and as Python's numbers, and the rest of a
    step that works on no prompts.
    """

    row: FloatArray
    values: tuple[float, ...]
    fixed_ns: float


class Asked(NamedTuple):
    """A model, and what it is asked of: operations of these classes (none: of all), in these number formats
    under the names that tables have for them (``formats``; none: in any).
    """

    model: OperationModel
    classes: frozenset[OpClass] = frozenset()
    formats: Mapping[str, str] = MappingProxyType({})
    kinds: frozenset[str] = frozenset()
    """Operations of these kinds only (none: of any)."""
    variant: str = ""
    """The library's kernel that is asked about (none: its default)."""
    inner: float = 1.0
    """Products are asked about with an inner dimension so many times as long."""


def step_times(
    kernels: LatticeKernels,
    device: Device,
    models: Sequence[Asked],
    *,
    num_ranks: int,
    diagnostics: Diagnostics,
) -> StepTimes:
    """Estimates of all points; of each kernel the shortest that one of the ``models`` says, as a library
    picks its fastest algorithm. Raises ``UnsupportedError`` where a kernel has no estimate.
    """
    used, place = np.unique(kernels.node, return_inverse=True)
    ops = operations_on(kernels.graph, device, num_ranks=num_ranks).take(used)
    classes = kernels.graph.op_class[used]
    best = np.full(len(used), np.inf)
    for asked in models:
        wanted = np.isin(classes, [int(each) for each in asked.classes or OpClass])
        if asked.formats:
            wanted &= np.isin(np.arange(len(ops)), ops.scheme.where(*asked.formats))
        if asked.kinds:
            wanted &= np.isin(np.arange(len(ops)), ops.kind.where(*asked.kinds))
        wanted[_foreign_experts(ops, asked, device, models)] = False
        rows = np.flatnonzero(wanted)
        if not len(rows):
            continue
        distinct, of_row = _renamed(ops.take(rows), asked).distinct()
        # who comes after the first gives other answers to the same: what it lacks is no finding
        heard = diagnostics if asked is models[0] else Diagnostics()
        said = predict_with(asked.model, distinct, device, heard).duration_ns
        best[rows] = np.fmin(best[rows], said[of_row])
    if np.isinf(best).any():
        missing = ops.kind[int(np.argmax(np.isinf(best)))]
        raise UnsupportedError(
            f"no estimate of {missing} on {device.name}", hint="another `estimator`, or fits of the device"
        )
    share_of = np.array([SHARES.index(_share(each)) for each in OpClass], np.int64)[classes]
    share_of[ops.kind.where("moe")] = SHARES.index("experts")
    share, time = share_of[place.reshape(-1)], best[place.reshape(-1)] * kernels.times
    grids = kernels.grids
    shapes = (
        (len(grids.tokens),),
        (len(grids.rows),),
        (len(grids.batch), len(grids.context)),
        (len(grids.prompts), len(grids.length), len(grids.before)),
    )
    tables: list[FloatArray] = []
    for part, shape in enumerate(shapes):
        mine, points = kernels.part == part, int(np.prod(shape))
        at = share[mine] * points + kernels.point[mine]
        sums = np.bincount(at, weights=time[mine], minlength=len(SHARES) * points)
        tables.append(np.asarray(sums, np.float64).reshape(len(SHARES), *shape))
    of_tokens, of_rows, of_decode, of_prompts = tables
    first = (kernels.point == 0) & (kernels.part != _OF_DECODE)
    launches = float(kernels.times[first].sum())
    return StepTimes(grids, of_tokens, of_rows, of_decode, of_prompts, kernels=launches)


def _foreign_experts(ops: Operations, asked: Asked, device: Device, models: Sequence[Asked]) -> IntArray:
    """Experts in a format that they were not measured in on the device, where they were in another that the
    ``models`` are asked about: what other devices or none say of them is of a kernel that it does not have.
    """
    measured = {_PLAIN.get(fit.scheme, fit.scheme) for fit in device.fits if fit.kind == "moe"}
    experts = ops.kind.where("moe")
    found = [np.zeros(0, np.int64)]
    for code, name in enumerate(ops.scheme.names):
        names = {each.formats.get(name, name) for each in models if not each.kinds or "moe" in each.kinds}
        if asked.formats.get(name, name) not in measured and names & measured:
            found.append(experts[ops.scheme.row[experts] == code])
    return np.concatenate(found)


_OF_DECODE = 2
"""The part of a step that works on sequences which decode."""


def _renamed(ops: Operations, asked: Asked) -> Operations:
    """The operations as tables call them."""
    if asked.variant:
        ops = replace(ops, variant=Labels.constant(asked.variant, len(ops)))
    if not asked.formats:
        return ops
    names = tuple(asked.formats.get(name, name) for name in ops.scheme.names)
    factor = np.where(np.isnan(ops.dim("k")), 1.0, asked.inner)
    dims = {**ops.dims, "k": np.ceil(ops.dim("k") * factor)}
    return replace(ops, scheme=Labels(ops.scheme.row, names), dims=dims, flops=ops.flops * factor)


def _share(op_class: OpClass) -> str:
    match op_class:
        case OpClass.CONTRACTION | OpClass.CONVOLUTION:
            return "products"
        case OpClass.ATTENTION:
            return "attention"
        case OpClass.COLLECTIVE | OpClass.P2P:
            return "collectives"
        case _:
            return "others"


_CUSTOM: Mapping[str, str] = {
    "vllm": "custom_allreduce-vllm:vLLM_custom_graph",
    "sglang": "custom_allreduce-sglang:SGLang_CustomAllReduce_graph",
    "trtllm": "custom_allreduce-trtllm",
}
"""A serving stack's own all-reduce, by what tables of collectives call it; NCCL's where that is faster."""
_FORMATS: tuple[Mapping[str, str], ...] = (
    {"f8E4M3FN": "fp8", "mxfp4": "w4a8_mxfp4_mxfp8", "i4": "int4_wo"},
    {"f8E4M3FN": "fp8_block", "mxfp4": "w4a16_mxfp4", "i4": "w4a16_mxfp4"},
)
"""Names under which tables hold products in a format. Those that tables time with the conversion of their
operands bound the bare product from above, so the shortest counts. Experts whose weights alone have 4 bits
were timed in one such format.
"""
_PLAIN: Mapping[str, str] = {"a8w8_fp8": "f8E4M3FN"}
"""Formats of tables that are asked about by the name of the element type."""
_FP4_INNER = 0.5625
"""Of a product in nvfp4 over one in 8 bits that moves as many bytes of weights, scales included, and takes as
long at their peaks: tables time products in nvfp4 only with the conversion of their operands.
"""
_FP4_EXPERTS = "trtllm 1.3.0rc20 moe_torch_flow_min_latency"
"""The kernel of experts in nvfp4 that libraries run on Blackwell, and tables have beside a general one."""
_MATRICES = frozenset({OpClass.CONTRACTION})
_LARGE = frozenset({OpClass.CONTRACTION, OpClass.ATTENTION, OpClass.COLLECTIVE, OpClass.P2P})


def models_of(stack: str, estimator: str) -> tuple[Asked, ...]:
    """Who is asked about the kernels of a serving stack: the estimator about products, attention and
    collectives, the stack's own all-reduce, and of what streams its data the roofline: serving libraries fuse
    it into kernels that run at the memory's speed.
    """
    model = _operation_model(estimator)
    custom = f"collectives:library={_CUSTOM[stack]},tuned=false" if stack in _CUSTOM else "collectives"
    return (
        Asked(model, _LARGE),
        *(Asked(model, _MATRICES, names) for names in _FORMATS),
        Asked(model, _MATRICES, {"nvfp4": "f8E4M3FN"}, kinds=frozenset({"matmul"}), inner=_FP4_INNER),
        Asked(model, _MATRICES, {"nvfp4": "nvfp4"}, kinds=frozenset({"moe"}), variant=_FP4_EXPERTS),
        Asked(_operation_model(custom), frozenset({OpClass.COLLECTIVE})),
        Asked(_operation_model("roofline"), frozenset(OpClass) - _LARGE),
    )


def _operation_model(spelling: str) -> OperationModel:
    model = load_estimator(spelling)
    if not isinstance(model, OperationModel):
        raise UnsupportedError(f"{spelling} knows no single operations", hint="`estimator=composite`")
    return model
