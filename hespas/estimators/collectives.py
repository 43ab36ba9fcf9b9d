"""Estimator of collectives: fitted lines of a library, extrapolated to other layouts and devices.

Sources in order: a fit of the device on the layout of ranks or between two layouts; a fit of the device
extrapolated to the layout; fits of the nearest reference devices, on the device's own links; NCCL's tuning
model times a ratio; the data sheet. No time is below the bandwidth bound of the links, and a group over
several nodes takes at least the time of its part inside one. The interval widens with the distance of the
source.

Two rules limit the use of a measured table:

    links     lines across nodes and through a host were measured on one cluster or server. They are used if
              their largest message agrees with the links that the device states, within the interval of the
              links' own model, or if the request names them
    parts     an all-reduce takes at most 1.1 x its reduce-scatter and its all-gather, and one of these at
              most twice the other. Tables that disagree are adjusted to their geometric mean
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp, inf, isnan, nan
from typing import ClassVar

import numpy as np

from hespas.estimators.collective_lines import (
    BETWEEN,
    NO_BAND,
    OF_HOST,
    OF_MODEL,
    OF_REFERENCE,
    OF_RELEASE,
    PER_DOUBLING,
    PER_OCTAVE,
    CollectiveLines,
    Spread,
    StartAndMoved,
    lines_of,
    widened,
    wiring_of,
)
from hespas.estimators.collective_links import (
    ALGORITHMS,
    TUNED,
    RankLayout,
    Tuned,
    fill_ns,
    link_inside,
    link_of,
    roof_ns,
    tuned_times,
)
from hespas.estimators.interface import Prediction, estimate_by_operation, with_bands
from hespas.estimators.rates import COLLECTIVE_KINDS, collective_time_ns
from hespas.graph import (
    BEYOND_RANGE,
    DATA_SHEET,
    MEASURED_BASIS,
    CollectiveKind,
    Diagnostics,
    Estimate,
    OpGraph,
    reference_basis,
)
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit, load_device
from hespas.hardware.device_fits import SEGMENTS
from hespas.operations import LabelColumn, Labels, Operations, find_scheme

__all__ = ["MEASURED", "RELATIONS", "Collectives", "reference_devices_of"]

_KIND = "collective"
_OWN = "custom_"
_LIBRARIES = ("nccl ", "oneccl ", "rccl ")
_SAME_TRAFFIC: Mapping[str, str] = {
    "ragged_all_to_all": "all_to_all",
    "reduce_scatter_block": "reduce_scatter",
}
"""Collectives that move the same bytes as another."""

MEASURED = (
    "A100-PCIe-80GB",
    "A100-SXM-80GB",
    "Arc-Pro-B60",
    "B200-SXM",
    "H100-SXM",
    "H200-SXM",
    "L40S",
)
"""Shipped devices with fits of collectives: the possible reference devices."""
RELATIONS = tuple(OF_REFERENCE)
"""Relations of a reference device to another device, the nearest first."""

_ALL_REDUCE_AND_PARTS = ("all_reduce", "reduce_scatter", "all_gather")
"""An all-reduce and the two collectives that together do the same."""
_WHOLE_OF_PARTS = 1.1
_PARTS_APART = 2.0
"""Limits of an all-reduce relative to its parts, and of one part relative to the other."""

_OWN_GROWTH = 0.1
"""Growth of the start of a serving framework's own kernels with each doubling of ranks: each rank reaches all
at once.
"""
_LEAST_NS = 1.0
_FITTED = "collectives.fitted"


class _LineCache:
    """Cache of the collective fits of devices and of the lines derived from them, shared by many requests."""

    def __init__(self) -> None:
        self._fits: dict[str, tuple[Fit, ...]] = {}
        self._lines: dict[int, CollectiveLines] = {}
        self.answers: dict[tuple[str, str, str, RankLayout, bytes], _CollectiveTimes | None] = {}
        """Times of single collectives; the rule of parts needs each three times."""

    def fits(self, device: Device, op: str) -> list[Fit]:
        """Return the fits of the collective ``op`` on ``device``."""
        if device.name not in self._fits:
            self._fits[device.name] = tuple(fit for fit in device.fits if fit.kind == _KIND)
        return [fit for fit in self._fits[device.name] if fit.op == op]

    def lines(self, fit: Fit, device: Device) -> CollectiveLines:
        """Return the lines of a fit of ``device``. Lines are cached by the identity of the fit object."""
        if id(fit) not in self._lines:
            support = next((entry for entry in fit.support if entry.name == "message_bytes"), None)
            low, high = (1.0, inf) if support is None else (support.low, support.high)
            growth = _OWN_GROWTH if fit.variant.startswith(_OWN) else nan
            rises = fit.variant.startswith(_LIBRARIES)
            self._lines[id(fit)] = CollectiveLines(fit.op, device, lines_of(fit), low, high, growth, rises)
        return self._lines[id(fit)]


@dataclass(frozen=True, slots=True, eq=False)
class _CollectiveRequest:
    """One collective operation on one layout of ranks, with message sizes ``message_bytes`` of shape
    ``(messages,)``.

    ``variant`` names the library and its version. If it is empty, ``library`` selects fits whose library name
    contains this text.
    """

    op: str
    scheme: str
    variant: str
    library: str
    device: Device
    cache: _LineCache
    layout: RankLayout
    message_bytes: FloatArray
    clusters: bool

    @property
    def wiring(self) -> str:
        """Return the kind of connection between the ranks, see
        :func:`~hespas.estimators.collective_lines.wiring_of`.
        """
        return wiring_of(self.device, self.layout)


_AS_FITTED = 0.5
"""Octaves beyond the fitted messages that count as within them."""


@dataclass(frozen=True, slots=True, eq=False)
class _CollectiveTimes:
    """Times and intervals of collectives, shape ``(3, messages)`` [ns], the basis of each time, and the code
    and text of the diagnostic that states their source.
    """

    times: FloatArray
    basis: Labels | str
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Estimator of collectives.

    ``library``: communication library for operations that do not name one (``nccl 2.29.2``, or a part of the
    name; empty: the default of the device). ``tuned``: use other models for collectives that were not fitted
    on the device; false leaves them unknown. ``num_ranks``: number of ranks in collectives over all ranks,
    for graphs that do not state it (-1: unknown). ``reference_devices``: shipped devices whose fits may be
    used for another device. ``clusters``: use fits across nodes; false ignores them.
    """

    library: str = ""
    tuned: bool = True
    num_ranks: int = -1
    reference_devices: tuple[str, ...] = MEASURED
    clusters: bool = True

    inert_options: ClassVar[frozenset[str]] = frozenset({"library"})

    @property
    def name(self) -> str:
        """Name of the model in the registry and in reports."""
        return "collectives"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Return the time of one execution of each collective on ``device``; see :class:`Estimator`."""
        return estimate_by_operation(self, graph, device, diagnostics, num_ranks=self.num_ranks)

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Return the time of one execution of each collective; NaN for uncovered ones and other operations.
        O(ops).
        """
        findings = Diagnostics() if diagnostics is None else diagnostics
        cache = _LineCache()
        times, basis = np.full((3, len(ops)), np.nan), LabelColumn(len(ops))
        others = 0
        for labels, rows in ops.classes():
            if labels[0] != _KIND:
                others += len(rows)
                continue
            times[:, rows], evidence = self._of_class(labels, ops.take(rows), device, cache, findings)
            basis.fill(rows, evidence)
        findings.info(
            "collectives.no-collective",
            device.name,
            "operations that are not collectives have no estimate",
            count=others,
        )
        return Prediction.of(self.name, times[0], times[1], times[2], basis=basis.labels())

    def _of_class(
        self,
        labels: tuple[str, str, str, str],
        ops: Operations,
        device: Device,
        cache: _LineCache,
        findings: Diagnostics,
    ) -> tuple[FloatArray, Labels]:
        """Return the time and interval of collectives with the same labels (kind, operation, number format
        and variant), shape ``(3, ops)``, and the basis of each time.
        """
        _, op, scheme, variant = labels
        location = " ".join(label for label in (device.name, op, scheme, variant) if label)
        times, basis = (
            np.where(ops.dim("ranks") == 1, 0.0, np.full((3, len(ops)), np.nan)),
            LabelColumn(len(ops)),
        )
        message, op = ops.dim("message_bytes"), _SAME_TRAFFIC.get(op, op)
        for layout, rows in _layouts(ops, device):
            request = _CollectiveRequest(
                op, scheme, variant, self.library, device, cache, layout, message[rows], self.clusters
            )
            answer = self._times(request)
            if answer is not None:
                times[:, rows] = answer.times
                basis.fill(rows, answer.basis)
                report = findings.info if answer.code == _FITTED else findings.warning
                report(answer.code, location, answer.message, count=len(rows))
        text = "neither fits nor models nor data sheets cover the collective, its ranks and its size"
        findings.warning("collectives.not-covered", location, text, count=int(np.isnan(times[0]).sum()))
        return times, basis.labels()

    def _times(self, request: _CollectiveRequest) -> _CollectiveTimes | None:
        """Return the times on one layout, None if they are unknown. An all-reduce is a reduce-scatter and an
        all-gather, so the times of these three operations are made consistent with each other.
        """
        single = self._single(request)
        is_named = bool(request.variant or request.library)
        if single is None or request.op not in _ALL_REDUCE_AND_PARTS or (is_named and single.code == _FITTED):
            return single
        whole = request.message_bytes * (request.layout.ranks if request.op == "all_gather" else 1)
        times: dict[str, FloatArray] = {}
        for op in _ALL_REDUCE_AND_PARTS:
            size = whole / request.layout.ranks if op == "all_gather" else whole
            other = single
            if op != request.op:
                part = self._single(replace(request, op=op, message_bytes=size))
                if part is None:
                    return single
                other = part
            times[op] = other.times[0]
        # Factors on the three times after which they obey the rule of parts.
        reduced, scatter, gather = (times[op] for op in _ALL_REDUCE_AND_PARTS)
        ratio = scatter / gather
        nearer = np.sqrt(np.maximum(np.maximum(ratio, 1 / ratio) / _PARTS_APART, 1.0))
        scatter_by = np.where(ratio > 1.0, 1 / nearer, nearer)
        both = scatter * scatter_by + gather / scatter_by
        less = np.sqrt(np.maximum(reduced / (_WHOLE_OF_PARTS * both), 1.0))
        factors = dict(
            zip(_ALL_REDUCE_AND_PARTS, (1 / less, scatter_by * less, less / scatter_by), strict=True)
        )
        factor = factors[request.op]
        if (factor == 1.0).all():
            return single
        text = f"{single.message}, adjusted to the parts of an all-reduce"
        return replace(single, times=single.times * factor, message=text)

    def _single(self, request: _CollectiveRequest) -> _CollectiveTimes | None:
        """Return the times on one layout of ranks, None if they are unknown. No time is shorter than the
        bandwidth of the links allows."""
        key = (
            request.op,
            request.scheme,
            request.variant,
            request.layout,
            request.message_bytes.tobytes(),
        )
        if key not in request.cache.answers:
            answer = _by_fit(request) or (self._from_elsewhere(request) if self.tuned else None)
            if answer is not None:
                roof = roof_ns(request.op, request.layout, request.message_bytes, request.device)
                time, low, high = answer.times
                time = np.maximum(time, roof)
                answer = replace(answer, times=np.stack((time, low, np.maximum(high, time))))
            request.cache.answers[key] = answer
        return request.cache.answers[key]

    def _from_elsewhere(self, request: _CollectiveRequest) -> _CollectiveTimes | None:
        """Return times for a layout that was not measured on this device: from other layouts, other devices
        or the data of the links.

        A collective that spans several nodes (or domains of the links) takes at least as long as the same
        collective inside one node, plus the time until the network has delivered the first bytes.
        """
        answer = (
            _by_carrying(request)
            or self._by_reference(request)
            or _by_algorithm(request)
            or _by_data_sheet(request)
        )
        layout = request.layout
        # The ranks of one node, or of one domain of its links if there are more.
        held = layout.per_node
        if layout.nodes == 1:
            domains = [link.devices_per_domain for link in request.device.links if link.kind == "scale_up"]
            held = max((domain for domain in domains if domain < held), default=0)
        if answer is None or held <= 1 or request.op == "permute":
            return answer
        inner = RankLayout(held, 1)
        # A gather passes on the whole buffer inside a node, from wherever its shards come.
        more = layout.ranks / inner.ranks if request.op == "all_gather" and layout.nodes > 1 else 1.0
        part = self._times(replace(request, layout=inner, message_bytes=request.message_bytes * more))
        if part is None:
            return answer
        least = part.times[0]
        if (link := request.device.link("scale_out")) is not None:
            rate = link.bandwidth_bytes_per_s
            least = least + fill_ns(request.op, request.layout, request.message_bytes, rate)
        return replace(answer, times=answer.times * np.maximum(least / answer.times[0], 1.0))

    def _by_reference(self, request: _CollectiveRequest) -> _CollectiveTimes | None:
        """Return the times of the nearest reference devices, scaled to the links of this device; None without
        reference devices.

        Networks between nodes differ between clusters. Therefore collectives across nodes use only siblings
        (devices of the same generation with equal links). Permutes use any reference device, because they
        have no other model.
        """
        near = reference_devices_of(request.device, request.layout, self.reference_devices)
        relations = RELATIONS if request.layout.nodes == 1 or request.op == "permute" else RELATIONS[:1]
        for relation in relations:
            names = [name for name, other in near if other == relation]
            by_name = {name: parts for name in names if (parts := _by_other(request, load_device(name)))}
            if by_name:
                return _of_references(request, relation, by_name)
        return None


def _layouts(ops: Operations, device: Device) -> Iterator[tuple[RankLayout, IntArray]]:
    """Yield each distinct layout of more than one rank, with the rows of ``ops`` that have it. If the number
    of ranks per node is not stated, the ranks are assumed to fill as few nodes as the scale-up domain allows.
    """
    ranks, per_node = ops.dim("ranks"), ops.dim("ranks_per_node")
    link = device.link("scale_up")
    domain = 0 if link is None else link.devices_per_domain
    fewest = np.ceil(ranks / domain) if domain > 0 else np.ones(len(ranks))
    nodes = np.where(np.isnan(per_node), fewest, np.ceil(ranks / np.maximum(per_node, 1)))
    pairs = np.stack((ranks, nodes), axis=1)
    complete = np.isfinite(pairs).all(axis=1) & np.isfinite(ops.dim("message_bytes")) & (ranks > 1)
    distinct, index = np.unique(pairs[complete], axis=0, return_inverse=True)
    rows = np.flatnonzero(complete)
    for number, (count, spread) in enumerate(distinct.tolist()):
        yield RankLayout(int(count), int(spread)), rows[index.reshape(-1) == number]


def _preferred(fits: Iterable[Fit], scheme: str, library: str, *, exact: bool) -> list[Fit]:
    """Return the fits that may be used for a request, the best first.

    Fits of the requested number format come first, then formats of the same width, then all others (a
    collective only moves bytes). Ties are resolved by the default fit, then by the number of samples. Kernels
    of a framework are used only if ``library`` names them or no other fit exists.
    """
    wide = _bits(scheme)
    matching = [fit for fit in fits if fit.form == SEGMENTS]
    matching = [fit for fit in matching if (fit.variant == library if exact else library in fit.variant)]
    general = [fit for fit in matching if not fit.variant.startswith(_OWN)]
    return sorted(
        matching if library else general or matching,
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
    known_scheme = find_scheme(scheme)
    return -1.0 if known_scheme is None else known_scheme.output_bits


def _exact(request: _CollectiveRequest, device: Device) -> list[Fit]:
    """Return the fits of the requested variant of a collective; without a variant, the fits of the requested
    library.
    """
    fits = request.cache.fits(device, request.op)
    return _preferred(fits, request.scheme, request.variant or request.library, exact=bool(request.variant))


def _transferable(request: _CollectiveRequest, device: Device) -> list[Fit]:
    """Return the fits of other variants that may be used for a request: first other releases of the requested
    library, then any library.
    """
    fits = request.cache.fits(device, request.op)
    if not request.variant:
        return _preferred(fits, request.scheme, request.library, exact=False)
    name = request.variant.partition(" ")[0] + " "
    same = _preferred(fits, request.scheme, name, exact=False)
    return [*same, *_preferred(fits, request.scheme, "", exact=False)]


def _applicable_lines(request: _CollectiveRequest, fit: Fit, device: Device) -> CollectiveLines:
    """Return the lines of a fit that may be used for a request. If the request names no library, lines that
    disagree with the stated links of ``device`` are removed.
    """
    lines = request.cache.lines(fit, device)
    if request.variant or request.library:
        return lines
    applicable = {
        layout: line
        for layout, line in lines.by_layout.items()
        if (layout.nodes == 1 or request.clusters) and _is_on_stated_links(lines, layout, device)
    }
    return lines if len(applicable) == len(lines.by_layout) else replace(lines, by_layout=applicable)


def _is_on_stated_links(lines: CollectiveLines, layout: RankLayout, device: Device) -> bool:
    """Return True if the measured time of the largest message agrees with the links in the device file: it is
    at most the time of the link model, multiplied by the model's uncertainty. Always True for switches and
    meshes inside a node.
    """
    wiring = wiring_of(device, layout)
    if lines.most == inf or wiring in ("switch", "mesh"):
        return True
    size = np.array([lines.most])
    ranks, nodes = np.array([float(layout.ranks)]), np.array([float(layout.nodes)])
    model = tuned_times(lines.op, ranks, nodes, size, device).duration_ns
    out = device.link("scale_out")
    if lines.op == "permute" and out is not None:
        model = np.nan_to_num(out.latency_ns) + size / out.bandwidth_bytes_per_s * 1e9
    elif np.isnan(model).any():
        kind = COLLECTIVE_KINDS.get(lines.op, CollectiveKind.UNKNOWN)
        beyond = np.array([layout.nodes > 1])
        model = collective_time_ns(np.array([int(kind)]), ranks, size, device, beyond_node=beyond)
    measured = float(lines.by_layout[layout].time_ns(size)[0])
    spread = OF_MODEL if layout.nodes > 1 else OF_MODEL.combined(OF_HOST[wiring])
    return bool(np.isnan(model).any()) or measured <= float(model[0]) * exp(spread.above)


def _by_fit(request: _CollectiveRequest) -> _CollectiveTimes | None:
    """Return the times by a fit of the device that has the layout of ranks, or has layouts with fewer and
    with more ranks; None without such a fit.
    """
    for fit in _exact(request, request.device):
        lines = _applicable_lines(request, fit, request.device)
        time = lines.inside(request.layout, request.message_bytes)
        if time is not None:
            between = BETWEEN[request.wiring].times(lines.distance(request.layout))
            times = _beyond(widened(_banded(fit, time), between), lines, request)
            outside = _octaves_beyond(lines, request) > _AS_FITTED
            basis = Labels.choice((MEASURED_BASIS, BEYOND_RANGE), outside.astype(np.int64))
            return _CollectiveTimes(times, basis, _FITTED, f"fitted for {fit.variant} in {fit.scheme}")
    return None


def _by_carrying(request: _CollectiveRequest) -> _CollectiveTimes | None:
    """Return the times by a fit of the device, extrapolated to the layout, or by a fit of another release of
    the library; None if the device has neither.
    """
    for fit in (*_exact(request, request.device), *_transferable(request, request.device)):
        lines = _applicable_lines(request, fit, request.device)
        parts = lines.parts(request.layout, request.message_bytes, request.device)
        if parts is None:
            continue
        spread = PER_DOUBLING[request.wiring].times(parts.doublings)
        if request.variant not in ("", fit.variant):
            spread = spread.combined(OF_RELEASE)
        times = _beyond(widened(_banded(fit, parts.time_ns), spread), lines, request)
        text = f"extrapolated from other ranks of {fit.variant} in {fit.scheme}"
        return _CollectiveTimes(times, BEYOND_RANGE, "collectives.carried", text)
    return None


def _banded(fit: Fit, time_ns: FloatArray) -> FloatArray:
    time_ns = np.maximum(time_ns, _LEAST_NS)
    return with_bands(fit, time_ns) if fit.bands else _certain(time_ns, NO_BAND)


def _certain(time_ns: FloatArray, spread: Spread) -> FloatArray:
    return widened(np.stack((time_ns, time_ns, time_ns)), spread)


def _beyond(times: FloatArray, lines: CollectiveLines, request: _CollectiveRequest) -> FloatArray:
    """Return times with intervals widened by the octaves by which messages are outside the fitted sizes."""
    return widened(times, PER_OCTAVE[request.wiring], _octaves_beyond(lines, request))


def _octaves_beyond(lines: CollectiveLines, request: _CollectiveRequest) -> FloatArray:
    size = np.maximum(request.message_bytes, 1.0)
    return np.maximum(np.maximum(np.log2(size / lines.most), np.log2(lines.least / size)), 0.0)


def reference_devices_of(
    device: Device, layout: RankLayout, names: Iterable[str] = MEASURED
) -> list[tuple[str, str]]:
    """Return the names of measured devices whose fits may be used for ``device``, each with its relation to
    ``device``.

    A ``sibling`` has the same vendor, generation and link speed. A ``family`` device has links of the same
    kind and topology from the same vendor. ``link data`` is any other device with links of the same kind.
    """
    link = link_inside(device, layout.per_node)
    references: list[tuple[str, str]] = []
    for name in names:
        other = load_device(name)
        other_link = other.link("scale_up") or other.link("pcie")
        if name in (device.name, device.fits_of) or other.kind != device.kind:
            continue
        if link is None or other_link is None or other_link.kind != link.kind:
            continue
        relation = "family"
        is_same_link = other_link.bandwidth_bytes_per_s == link.bandwidth_bytes_per_s
        if other.vendor != device.vendor or other_link.topology != link.topology:
            relation = "link data"
        elif is_same_link and _generation(other) == _generation(device):
            relation = "sibling"
        references.append((name, relation))
    return references


def _generation(device: Device) -> str:
    return device.family.partition(" ")[0]


def _by_other(request: _CollectiveRequest, other: Device) -> StartAndMoved | None:
    """Return the times by the fits of another device, scaled to the links of this device. Return None if the
    other device does not state its links.
    """
    if link_of(other, request.layout) is None:
        return None
    for fit in _transferable(request, other):
        lines = _applicable_lines(request, fit, other)
        parts = lines.parts(request.layout, request.message_bytes, request.device)
        if parts is not None:
            return parts
    return None


def _of_references(
    request: _CollectiveRequest, relation: str, by_name: Mapping[str, StartAndMoved]
) -> _CollectiveTimes:
    """Return the geometric mean of the times by the reference devices in ``by_name``. All devices of one
    generation together count as one.

    For relations other than ``sibling``, the result is the mean of this time and the time of NCCL's tuning
    model. On the measured devices the median error of this mean is 15-27 %. It is 15-41 % for the references
    alone and 16-32 % for the model alone.
    """
    families: dict[str, list[FloatArray]] = {}
    for name, parts in by_name.items():
        logs = np.log(np.maximum(parts.time_ns, _LEAST_NS))
        families.setdefault(_generation(load_device(name)), []).append(logs)
    means = np.stack([np.stack(logs).mean(axis=0) for logs in families.values()])
    time: FloatArray = np.exp(means.mean(axis=0))
    doublings = min(parts.doublings for parts in by_name.values())
    spread = OF_REFERENCE[relation].combined(PER_DOUBLING[request.wiring].times(doublings))
    if relation != "sibling":
        model = _tuned(request).duration_ns
        time = np.where(np.isnan(model), time, np.sqrt(time * model))
        spread = spread.combined(_of_host(request))
    text = f"transferred from the fits of {', '.join(by_name)} ({relation}) to its own links"
    return _CollectiveTimes(_certain(time, spread), reference_basis(by_name), "collectives.kin", text)


def _of_host(request: _CollectiveRequest) -> Spread:
    """Return the additional uncertainty of ranks that are connected through the host. It is 0 for two ranks,
    because they share their host links with no other rank.
    """
    is_pair = request.wiring == "host" and request.layout.ranks == 2
    return Spread(0.0, 0.0) if is_pair else OF_HOST[request.wiring]


def _tuned(request: _CollectiveRequest) -> Tuned:
    count = len(request.message_bytes)
    ranks, nodes = np.full(count, float(request.layout.ranks)), np.full(count, float(request.layout.nodes))
    return tuned_times(request.op, ranks, nodes, request.message_bytes, request.device)


def _by_algorithm(request: _CollectiveRequest) -> _CollectiveTimes | None:
    """Return the times of NCCL's tuning model. Inside one node they are multiplied by a ratio that was fitted
    for the device; across nodes the ratio is 1.
    """
    tuned = _tuned(request)
    if np.isnan(tuned.duration_ns).any():
        return None
    fits = request.cache.fits(request.device, request.op)
    fit = next((entry for entry in fits if entry.form == TUNED and entry.variant == ANY), None)
    is_inside = request.layout.nodes == 1 and fit is not None and not isnan(fit.value("ratio"))
    ratio = fit.value("ratio") if fit is not None and is_inside else 1.0
    numbers: list[int] = np.unique(tuned.algorithm).tolist()
    names = ", ".join(ALGORITHMS[number] for number in numbers)
    times = _certain(tuned.duration_ns * ratio, OF_MODEL.combined(_of_host(request)))
    return _CollectiveTimes(
        times, DATA_SHEET, "collectives.tuned", f"NCCL's model of {names}, times {ratio:.3g}"
    )


def _by_data_sheet(request: _CollectiveRequest) -> _CollectiveTimes | None:
    """Return the times by the data sheet: latencies plus bytes over the bandwidth of the links."""
    kind, count = COLLECTIVE_KINDS.get(request.op, CollectiveKind.UNKNOWN), len(request.message_bytes)
    time = collective_time_ns(
        np.full(count, int(kind)),
        np.full(count, float(request.layout.ranks)),
        request.message_bytes,
        request.device,
        beyond_node=np.full(count, request.layout.nodes > 1),
    )
    if np.isnan(time).any():
        return None
    time = np.maximum(request.device.launch_overhead_ns + time, _LEAST_NS)
    times = _certain(time, OF_MODEL.combined(_of_host(request)))
    return _CollectiveTimes(
        times, DATA_SHEET, "collectives.data-sheet", "latencies and bandwidths of the data sheet"
    )
