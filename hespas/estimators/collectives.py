"""The estimator of collectives: fitted lines of a library where one was measured, NCCL's own model elsewhere.

Between two fitted numbers of ranks the logarithm of the time is linear in that of the ranks. A group of ranks
or a spread over nodes that no fit covers takes the time of NCCL's tuning model, scaled as its fit says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isnan
from typing import NamedTuple

import numpy as np

from hespas.estimators.registry import Prediction, estimate_by_operation, with_bands
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit
from hespas.hardware.model import SEGMENTS, segment_name
from hespas.operations import Operations, find_scheme

__all__ = [
    "ALGORITHMS",
    "SEGMENTS",
    "TUNED",
    "Collectives",
    "Layout",
    "Line",
    "Tuned",
    "basis",
    "lines_of",
    "named",
    "tuned_times",
]

TUNED = "nccl"
"""The form of NCCL's tuning model times a ratio."""

_KIND = "collective"
_OWN = "custom_"
_SAME_TRAFFIC: Mapping[str, str] = {
    "ragged_all_to_all": "all_to_all",
    "reduce_scatter_block": "reduce_scatter",
}
"""Collectives that move what another does."""
_UNFITTED = (0.8, 2.1)
"""Of NCCL's model without a fit: 90 % of what was measured on A100, H100, H200 and B200 lies between."""
_PER_DOUBLING = 0.25
_MARGIN = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """Operations of one class: columns of shape ``(ops,)``."""

    op: str
    where: str
    ranks: FloatArray
    nodes: FloatArray
    message_bytes: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The estimator. ``library`` names whose fits count where operations name none (``nccl 2.29.2``, a
    part is enough; empty: the device's default). ``tuned`` false refuses what no fit covers. ``num_ranks``:
    size of collectives over all ranks where the graph does not say (-1: unknown).
    """

    library: str = ""
    tuned: bool = True
    num_ranks: int = -1

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        return "collectives"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each collective on ``device``; see :class:`Estimator`."""
        return estimate_by_operation(self, graph, device, diagnostics, num_ranks=self.num_ranks)

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """The time of one execution of each collective; NaN for all that nothing covers. O(ops)."""
        found = Diagnostics() if diagnostics is None else diagnostics
        fits = [fit for fit in device.fits if fit.kind == _KIND]
        said = np.full((3, len(ops)), np.nan)
        others = 0
        for labels, rows in ops.classes():
            if labels[0] != _KIND:
                others += len(rows)
                continue
            said[:, rows] = self._of_class(labels, ops.take(rows), fits, device, found)
        found.info(
            "collectives.no-collective", device.name, "operations that are no collective", count=others
        )
        return Prediction.of(self.name, said[0], said[1], said[2])

    def _of_class(
        self,
        labels: tuple[str, str, str, str],
        ops: Operations,
        fits: Iterable[Fit],
        device: Device,
        found: Diagnostics,
    ) -> FloatArray:
        """Time and interval, shape (3, ops)."""
        _, op, scheme, variant = labels
        ranks, per_node = ops.dim("ranks"), ops.dim("ranks_per_node")
        nodes = np.where(np.isnan(per_node), _nodes(ranks, device), np.ceil(ranks / np.maximum(per_node, 1)))
        where = " ".join(label for label in (device.name, op, scheme, variant) if label)
        asked = _Question(_SAME_TRAFFIC.get(op, op), where, ranks, nodes, ops.dim("message_bytes"))
        said = np.where(ranks == 1, 0.0, np.full((3, len(ops)), np.nan))
        mine = [fit for fit in fits if fit.op == asked.op]
        for fit in _preferred(mine, scheme, variant or self.library, exact=bool(variant)):
            missing = np.isnan(said[0])
            if not missing.any():
                break
            answer = _by_fit(fit, asked)
            said = np.where(missing, answer, said)
            text = f"fitted for {fit.variant} in {fit.scheme}"
            found.info("collectives.fitted", where, text, count=int((missing & ~np.isnan(said[0])).sum()))
        if self.tuned:
            missing = np.isnan(said[0])
            said = np.where(missing, _by_algorithm(mine, asked, device, missing, found), said)
        text = "no fit and no model of NCCL covers the collective, its ranks and its size"
        found.warning("collectives.not-covered", where, text, count=int(np.isnan(said[0]).sum()))
        return said


def _nodes(ranks: FloatArray, device: Device) -> FloatArray:
    """Nodes for so many ranks where nobody says: as few as the scale-up domain allows."""
    link = device.link("scale_up")
    domain = 0 if link is None else link.devices_per_domain
    return np.ceil(ranks / domain) if domain > 0 else np.ones(len(ranks))


def _preferred(fits: Iterable[Fit], scheme: str, library: str, *, exact: bool) -> list[Fit]:
    """Fits that may cover a class, the best first: those of a general library before a framework's own, the
    number format asked before one as wide before any (a collective moves bytes), the default, the most
    samples.
    """
    wide = _bits(scheme)
    mine = [fit for fit in fits if fit.form == SEGMENTS]
    mine = [fit for fit in mine if (fit.variant == library if exact else library in fit.variant)]
    return sorted(
        mine,
        key=lambda fit: (
            fit.variant.startswith(_OWN),
            fit.scheme != scheme,
            _bits(fit.scheme) != wide,
            not fit.default,
            -fit.samples,
            fit.variant,
        ),
    )


def _bits(scheme: str) -> float:
    found = find_scheme(scheme)
    return -1.0 if found is None else found.output_bits


def _by_fit(fit: Fit, asked: _Question) -> FloatArray:
    """What one fit says, shape (3, ops); NaN for ranks or nodes that it does not reach."""
    lines = lines_of(fit)
    time = np.full(len(asked.ranks), np.nan)
    pairs = np.stack((asked.ranks, asked.nodes), axis=1)
    known = np.isfinite(pairs).all(axis=1)
    for ranks, nodes in np.unique(pairs[known], axis=0).tolist():
        rows = np.flatnonzero(known & (pairs[:, 0] == ranks) & (pairs[:, 1] == nodes))
        time[rows] = _of_layout(lines, ranks, nodes, asked.message_bytes[rows])
    beyond = _doublings_beyond(fit, asked.message_bytes)
    widening = 1 + _PER_DOUBLING * np.maximum(beyond - _MARGIN, 0.0)
    return with_bands(fit, np.where(time > 0, time, np.nan), widening)


def _of_layout(lines: dict[Layout, Line], ranks: float, nodes: float, size: FloatArray) -> FloatArray:
    """The time on one layout: its own line, or between those of fewer and of more ranks on as many nodes."""
    own = lines.get(Layout(int(ranks), int(nodes)))
    if own is not None:
        return own.time_ns(size)
    alike = sorted(layout for layout in lines if layout.nodes == nodes)
    fewer = [layout for layout in alike if layout.ranks < ranks]
    more = [layout for layout in alike if layout.ranks > ranks]
    if not fewer or not more:
        return np.full(len(size), np.nan)
    low, high = fewer[-1], more[0]
    share = np.log(ranks / low.ranks) / np.log(high.ranks / low.ranks)
    with np.errstate(divide="ignore"):
        fewer_ns, more_ns = np.log(lines[low].time_ns(size)), np.log(lines[high].time_ns(size))
    between: FloatArray = np.exp((1 - share) * fewer_ns + share * more_ns)
    return between


def _doublings_beyond(fit: Fit, size: FloatArray) -> FloatArray:
    """Doublings by which messages leave the sizes that were fitted on."""
    total = np.zeros(len(size))
    for each in fit.support:
        if each.name == "message_bytes":
            with np.errstate(divide="ignore", invalid="ignore"):
                total = np.maximum(np.log2(size / each.high), np.log2(each.low / np.maximum(size, 1.0)))
    return np.maximum(np.nan_to_num(total), 0.0)


def _by_algorithm(
    fits: Iterable[Fit], asked: _Question, device: Device, missing: BoolArray, found: Diagnostics
) -> FloatArray:
    """NCCL's model times the ratio that was fitted for the device, shape (3, ops)."""
    tuned = tuned_times(asked.op, asked.ranks, asked.nodes, asked.message_bytes, device)
    fit = next((each for each in fits if each.form == TUNED and each.variant == ANY), None)
    ratio = 1.0 if fit is None or isnan(fit.value("ratio")) else fit.value("ratio")
    for number in np.unique(tuned.algorithm[missing & (tuned.algorithm >= 0)]).tolist():
        count = int((missing & (tuned.algorithm == number)).sum())
        text = f"NCCL's model of {ALGORITHMS[number]}, times {ratio:.3g}"
        found.warning("collectives.tuned", asked.where, text, count=count)
    time = tuned.duration_ns * ratio
    if fit is not None:
        return with_bands(fit, time)
    return np.stack((time, time * _UNFITTED[0], time * _UNFITTED[1]))


# Which algorithm NCCL takes for a collective, and how long its own model says that this takes.
#
# Figures are those of NCCL's tuning model (github.com/NVIDIA/nccl, src/graph/tuning.cc, ncclTunerConstants):
# start of a protocol, latency of a step, caps of bandwidth, by generation. The least of all times is taken:
#
#     t = base + steps x latency + bytes of the whole buffer / bandwidth of the algorithm
#
# Rings move a message in 2 (N - 1) steps (all-reduce) or N - 1, trees up and down, NVLS lets the switch
# reduce, all-to-alls send directly to all. NCCL counts on 20 of 25 GB/s of each NVLink: links are taken at
# four fifths.

ALGORITHMS = (
    "ring LL",
    "ring LL128",
    "ring Simple",
    "tree LL",
    "tree LL128",
    "tree Simple",
    "NVLS",
    "direct",
)
"""Algorithm and protocol; what :attr:`Tuned.algorithm` numbers."""
_NVLS, _DIRECT = 6, 7

_BASE_US = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
_STEP_US = {
    "nvlink": {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)},
    "pci": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)},
    "net": {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)},
}
_NVLS_US, _NVLS_NET_US = 25.0, 18.0
_NET_OVERHEAD_US = 1.0
_LINK_SHARE = 0.8
_CHANNELS = 16
_LL128_SHARE = 0.92
_TREE_SHARE = 0.92
_NOT_INTERLEAVED = 0.85


class _Generation(NamedTuple):
    """Caps of one generation [GB/s]: of LL, per channel of LL128 and of trees; the share that NVLS gets."""

    low_latency: float
    ring_ll128: float
    tree_ll128: float
    tree: float
    nvls: float


_GENERATIONS: Mapping[str, _Generation] = {
    **dict.fromkeys(("pascal", "volta", "turing"), _Generation(39.0, 20.0, 20.0, 26.5, 0.0)),
    "ampere": _Generation(87.7, 20.0, 20.0, 24.0, 0.0),
    "ada": _Generation(87.7, 20.0, 20.0, 24.0, 0.0),
    "hopper": _Generation(141.0, 36.7, 36.7, 38.7, 0.85),
    **dict.fromkeys(("blackwell", "blackwell ultra"), _Generation(282.0, 40.0, 55.6, 70.0, 0.74)),
}
"""By compute capability: NCCL takes all before 8.0 as Volta, all from 10.0 on as Blackwell."""
_LL_ACROSS_NODES = (22.5, 19.0)
"""LL across two nodes, and more."""


@dataclass(frozen=True, slots=True, eq=False)
class Tuned:
    """Columns of shape ``(ops,)``: the time [ns], NaN where the model says nothing, and its algorithm."""

    duration_ns: FloatArray
    algorithm: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What is asked: ``size`` is the whole buffer [bytes], ``bus`` the rate of a ring [GB/s]."""

    ranks: FloatArray
    nodes: FloatArray
    size: FloatArray
    steps: FloatArray
    hops: FloatArray
    bus: FloatArray
    reduces: bool
    wire: str
    generation: _Generation


def tuned_times(op: str, ranks: FloatArray, nodes: FloatArray, message: FloatArray, device: Device) -> Tuned:
    """The time of one collective for numbers of ranks and nodes and message sizes (Chakra's sense).

    NaN for devices that NCCL does not run on, operations it does not tune, and links that are not stated.
    """
    generation = _GENERATIONS.get(device.family.lower())
    found = Tuned(np.full(len(ranks), np.nan), np.full(len(ranks), -1, np.int64))
    if device.vendor.lower() != "nvidia" or generation is None:
        return found
    job = _job(op, (ranks, nodes, message), device, generation)
    if job is None:
        return found
    times = np.full((len(ALGORITHMS), len(ranks)), np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):  # one rank takes no steps
        for place, time in _times(op, job, device):
            times[place] = time
    times = np.where(np.isnan(times), np.inf, times)
    algorithm = times.argmin(axis=0)
    best = times.min(axis=0) * 1e3
    known = np.isfinite(best) & (ranks > 1)
    return Tuned(np.where(known, best, np.nan), np.where(known, algorithm, -1))


_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def _job(
    op: str, sizes: tuple[FloatArray, FloatArray, FloatArray], device: Device, generation: _Generation
) -> _Job | None:
    """The figures of an operation; None for one that is not tuned, or where no link is stated."""
    ranks, nodes, message = sizes
    up = device.link("scale_up") or device.link("pcie")
    if op not in _STEPS or up is None:
        return None
    out = device.link("scale_out")
    inside = _LINK_SHARE * up.bandwidth_bytes_per_s / 1e9
    outside = np.nan if out is None else out.bandwidth_bytes_per_s / 1e9
    bus = np.where(nodes > 1, np.minimum(inside, outside * ranks / nodes), inside)
    return _Job(
        ranks=ranks,
        nodes=nodes,
        size=message * ranks if op == "all_gather" else message,
        steps=_STEPS[op] * (ranks - 1),
        hops=_STEPS[op] * (nodes - 1),
        bus=bus,
        reduces=op == "all_reduce",
        wire="nvlink" if up.kind == "scale_up" else "pci",
        generation=generation,
    )


def _times(op: str, job: _Job, device: Device) -> Iterator[tuple[int, FloatArray]]:
    """Times [us] of each algorithm that may run the job."""
    if op == "all_to_all":
        yield _DIRECT, _direct(job)
        return
    wired = job.wire == "nvlink"
    for protocol in (0, 1, 2) if wired else (0, 2):
        yield protocol, _ring(job, protocol)
        if job.reduces:
            yield 3 + protocol, _tree(job, protocol)
    up = device.link("scale_up")
    if job.generation.nvls and up is not None and up.topology == "switch":
        yield _NVLS, _nvls(job)


def _low_latency(job: _Job) -> FloatArray:
    across = np.where(job.nodes > 2, _LL_ACROSS_NODES[1], _LL_ACROSS_NODES[0])
    return np.where(job.nodes > 1, across, job.generation.low_latency)


def _moved(job: _Job, rate: FloatArray) -> FloatArray:
    """Microseconds for the whole buffer at some GB/s."""
    return job.size / rate / 1e3


def _ring(job: _Job, protocol: int) -> FloatArray:
    bus = job.bus
    if protocol == 0:
        bus = np.minimum(_low_latency(job), bus * 0.5)
    elif protocol == 1:
        bus = np.minimum(bus * _LL128_SHARE, _CHANNELS * job.generation.ring_ll128)
    inner = np.where(
        job.nodes > 1,
        np.maximum(_STEP_US[job.wire]["ring"][protocol], _NET_OVERHEAD_US),
        _STEP_US[job.wire]["ring"][protocol],
    )
    latency = _BASE_US["ring"][protocol] + (job.steps - job.hops) * inner
    latency = latency + job.hops * _STEP_US["net"]["ring"][protocol]
    return latency + _moved(job, bus * job.ranks / job.steps)


def _tree(job: _Job, protocol: int) -> FloatArray:
    bus = np.minimum(job.bus * _TREE_SHARE, _CHANNELS * job.generation.tree)
    if protocol == 0:
        bus = np.minimum(bus / 3.8, _low_latency(job))
    elif protocol == 1:
        share = np.where(job.nodes > 1, 120 / 128, 7 / 9)
        bus = np.minimum(bus * share, _CHANNELS * job.generation.tree_ll128)
    levels = np.floor(np.log2(np.maximum(job.nodes, 1)))
    inner = (job.ranks / job.nodes - 1) * _STEP_US[job.wire]["tree"][protocol]
    latency = _BASE_US["tree"][protocol] + 2 * (inner + levels * _STEP_US["net"]["tree"][protocol])
    return latency + _moved(job, bus * _NOT_INTERLEAVED / 2)


def _nvls(job: _Job) -> FloatArray:
    bus = job.bus * job.generation.nvls * (_CHANNELS - 1) / _CHANNELS
    bus = bus * (2 * job.ranks / job.steps if job.reduces else (job.ranks - 1) / job.ranks)
    single = (job.nodes == 1) & (job.ranks > 2)
    latency = np.where(job.nodes > 1, _NVLS_US + _NVLS_NET_US, _NVLS_US)
    return np.where(single | job.reduces & (job.nodes > 1), latency + _moved(job, bus), np.inf)


def _direct(job: _Job) -> FloatArray:
    """All at once to all peers: the start of the simple protocol and the bytes that leave a rank."""
    share = (job.ranks - 1) / job.ranks
    latency = np.where(job.nodes > 1, _STEP_US["net"]["ring"][2], _STEP_US[job.wire]["ring"][2])
    return _BASE_US["ring"][0] + latency + _moved(job, job.bus / share)


# Times of a collective as a start and up to a few segments of bytes, one line for each number of ranks.
#
# t = t0 + sum over segments of rate_i x (bytes of the message between knee_(i-1) and knee_i)      [ns]
#
# One segment is alpha and beta; a knee is where a library turns to another protocol or algorithm. Rates are
# of message bytes as Chakra counts them: the whole buffer, the shard for gathers.


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """How many ranks take part, spread over how many nodes."""

    ranks: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Line:
    """``knees_bytes`` rise; there is one rate more than knees."""

    t0_ns: float
    knees_bytes: tuple[float, ...]
    ns_per_byte: tuple[float, ...]

    def time_ns(self, message_bytes: FloatArray) -> FloatArray:
        """The time of messages, shape ``(messages,)``."""
        values: FloatArray = np.array((self.t0_ns, *self.ns_per_byte), np.float64)
        return np.asarray(basis(message_bytes, self.knees_bytes) @ values, np.float64)


def basis(message_bytes: FloatArray, knees_bytes: Iterable[float]) -> FloatArray:
    """One, and the bytes of each message in each segment; shape ``(messages, segments + 1)``."""
    edges = (0.0, *knees_bytes, inf)
    parts = [np.clip(message_bytes, low, high) - low for low, high in pairwise(edges)]
    return np.stack((np.ones(len(message_bytes)), *parts), axis=1)


def named(layout: Layout, line: Line) -> Iterable[tuple[str, float]]:
    """The parameters of one line by name."""
    stem = f"r{layout.ranks}_n{layout.nodes}_"
    yield f"{stem}t0_ns", line.t0_ns
    yield from ((f"{stem}knee{place}_bytes", size) for place, size in enumerate(line.knees_bytes, 1))
    yield from ((f"{stem}ns_per_byte{place}", rate) for place, rate in enumerate(line.ns_per_byte, 1))


def lines_of(fit: Fit) -> dict[Layout, Line]:
    """The lines of a fit by layout; those whose parameters are not all there are left out."""
    found: dict[Layout, dict[str, float]] = {}
    for each in fit.parameters:
        if name := segment_name(each.name):
            found.setdefault(Layout(name.ranks, name.nodes), {})[name.part] = each.value
    lines: dict[Layout, Line] = {}
    for layout, values in sorted(found.items()):
        knees = tuple(_numbered(values, "knee{}_bytes"))
        rates = tuple(_numbered(values, "ns_per_byte{}"))
        if len(rates) == len(knees) + 1 and not isnan(values.get("t0_ns", np.nan)):
            lines[layout] = Line(values["t0_ns"], knees, rates)
    return lines


def _numbered(values: dict[str, float], name: str) -> Iterable[float]:
    place = 1
    while (value := values.get(name.format(place))) is not None:
        yield value
        place += 1
