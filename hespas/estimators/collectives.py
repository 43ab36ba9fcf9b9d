"""The estimator of collectives: fitted lines of a library where one was measured, carried over elsewhere.

Sources in order: a fit of the device on the layout of ranks or between two; a fit of the device carried to
the layout; fits of the devices nearest to it, on its own links; NCCL's tuning model times a ratio; the data
sheet. No time is below the roof of the links, and a group over several nodes takes no less than its part
inside one. The interval widens with the distance that an answer was carried.

Two rules limit what a measured table may say:

    links     lines across nodes and through a host were measured on one cluster or server. They answer where
              their largest message agrees with the links that the device states, within the interval of the
              links' own model, or where the request names them
    parts     an all-reduce takes at most 1.1 x its reduce-scatter and its all-gather, and one of these at
              most twice the other. Tables that disagree meet half way, on a logarithmic scale
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
    OF_KIN,
    OF_MODEL,
    OF_RELEASE,
    PER_DOUBLING,
    PER_OCTAVE,
    Lines,
    Parts,
    Spread,
    lines_of,
    widened,
    wiring_of,
)
from hespas.estimators.collective_links import (
    ALGORITHMS,
    TUNED,
    Layout,
    Tuned,
    fill_ns,
    link_inside,
    link_of,
    roof_ns,
    tuned_times,
)
from hespas.estimators.interface import Prediction, estimate_by_operation, with_bands
from hespas.estimators.rates import collective_time_ns
from hespas.graph import CollectiveKind, Diagnostics, Estimate, OpGraph
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit, Link, load_device
from hespas.hardware.device_fits import SEGMENTS
from hespas.operations import Operations, find_scheme

__all__ = ["KINSHIPS", "MEASURED", "Collectives", "kin_of"]

_KIND = "collective"
_OWN = "custom_"
_LIBRARIES = ("nccl ", "oneccl ", "rccl ")
_SAME_TRAFFIC: Mapping[str, str] = {
    "ragged_all_to_all": "all_to_all",
    "reduce_scatter_block": "reduce_scatter",
}
"""Collectives that move what another does."""
_KINDS: Mapping[str, CollectiveKind] = {each.name.lower(): each for each in CollectiveKind}

MEASURED = (
    "A100-PCIe-80GB",
    "A100-SXM-80GB",
    "Arc-Pro-B60",
    "B200-SXM",
    "H100-SXM",
    "H200-SXM",
    "L40S",
)
"""The shipped devices with fits of collectives: those that others may be like."""
KINSHIPS = tuple(OF_KIN)
"""How another device may be related, the nearest first."""

_PARTS = ("all_reduce", "reduce_scatter", "all_gather")
"""An all-reduce and the two collectives that together do the same."""
_WHOLE_OF_PARTS = 1.1
_PARTS_APART = 2.0
"""The most that an all-reduce takes of its parts, and one part of the other."""

_OWN_GROWTH = 0.1
"""Of the start of a serving framework's own kernels with each doubling of ranks: each reaches all at once."""
_LEAST_NS = 1.0
_FITTED = "collectives.fitted"


class _Shelf:
    """Fits of collectives by device, and their lines, read once for many questions."""

    def __init__(self) -> None:
        self._fits: dict[str, tuple[Fit, ...]] = {}
        self._lines: dict[int, Lines] = {}
        self.answers: dict[tuple[str, str, str, Layout, bytes], _Answer | None] = {}
        """Times of single collectives, which the rule of parts needs three times each."""

    def fits(self, device: Device, op: str) -> list[Fit]:
        """Those of one operation."""
        if device.name not in self._fits:
            self._fits[device.name] = tuple(fit for fit in device.fits if fit.kind == _KIND)
        return [fit for fit in self._fits[device.name] if fit.op == op]

    def lines(self, fit: Fit, device: Device) -> Lines:
        """The lines of a fit of a device. The shelf holds the fit, so its identity stands for it."""
        if id(fit) not in self._lines:
            support = next((each for each in fit.support if each.name == "message_bytes"), None)
            low, high = (1.0, inf) if support is None else (support.low, support.high)
            growth = _OWN_GROWTH if fit.variant.startswith(_OWN) else nan
            rises = fit.variant.startswith(_LIBRARIES)
            self._lines[id(fit)] = Lines(fit.op, device, lines_of(fit), low, high, growth, rises)
        return self._lines[id(fit)]


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """Messages of one operation on one layout: ``message_bytes`` of shape ``(messages,)``. ``library`` is
    part of a variant's name where ``variant`` names none.
    """

    op: str
    scheme: str
    variant: str
    library: str
    device: Device
    shelf: _Shelf
    layout: Layout
    message_bytes: FloatArray
    clusters: bool

    @property
    def wiring(self) -> str:
        """What joins the ranks."""
        return wiring_of(self.device, self.layout)


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """Times and intervals of shape ``(3, messages)`` [ns], and the finding that says whose they are."""

    times: FloatArray
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The estimator. ``library`` names whose fits count where operations name none (``nccl 2.29.2``, a
    part is enough; empty: the device's default). ``tuned`` false refuses what no fit of the device covers.
    ``num_ranks``: size of collectives over all ranks where the graph does not say (-1: unknown). ``kin`` are
    the shipped devices whose fits may speak for another. ``clusters`` false ignores lines across nodes.
    """

    library: str = ""
    tuned: bool = True
    num_ranks: int = -1
    kin: tuple[str, ...] = MEASURED
    clusters: bool = True

    inert_options: ClassVar[frozenset[str]] = frozenset({"library"})

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
        shelf = _Shelf()
        said = np.full((3, len(ops)), np.nan)
        others = 0
        for labels, rows in ops.classes():
            if labels[0] != _KIND:
                others += len(rows)
                continue
            said[:, rows] = self._of_class(labels, ops.take(rows), device, shelf, found)
        found.info(
            "collectives.no-collective", device.name, "operations that are no collective", count=others
        )
        return Prediction.of(self.name, said[0], said[1], said[2])

    def _of_class(
        self,
        labels: tuple[str, str, str, str],
        ops: Operations,
        device: Device,
        shelf: _Shelf,
        found: Diagnostics,
    ) -> FloatArray:
        """Time and interval, shape (3, ops)."""
        _, op, scheme, variant = labels
        where = " ".join(label for label in (device.name, op, scheme, variant) if label)
        said = np.where(ops.dim("ranks") == 1, 0.0, np.full((3, len(ops)), np.nan))
        message, op = ops.dim("message_bytes"), _SAME_TRAFFIC.get(op, op)
        for layout, rows in _layouts(ops, device):
            asked = _Question(
                op, scheme, variant, self.library, device, shelf, layout, message[rows], self.clusters
            )
            answer = self._answer(asked)
            if answer is not None:
                said[:, rows] = answer.times
                tell = found.info if answer.code == _FITTED else found.warning
                tell(answer.code, where, answer.message, count=len(rows))
        text = "neither fits nor models nor data sheets cover the collective, its ranks and its size"
        found.warning("collectives.not-covered", where, text, count=int(np.isnan(said[0]).sum()))
        return said

    def _answer(self, asked: _Question) -> _Answer | None:
        """Return the times of one layout, consistent with the parts of an all-reduce; None if unknown."""
        found = self._alone(asked)
        is_named = bool(asked.variant or asked.library)
        if found is None or asked.op not in _PARTS or (is_named and found.code == _FITTED):
            return found
        return self._consistent(asked, found)

    def _consistent(self, asked: _Question, found: _Answer) -> _Answer:
        """Return the times after the rule of parts; unchanged where one of the three is unknown."""
        whole = asked.message_bytes * (asked.layout.ranks if asked.op == "all_gather" else 1)
        times: dict[str, FloatArray] = {}
        for op in _PARTS:
            size = whole / asked.layout.ranks if op == "all_gather" else whole
            other = found if op == asked.op else self._alone(replace(asked, op=op, message_bytes=size))
            if other is None:
                return found
            times[op] = other.times[0]
        factor = _agreement(times)[asked.op]
        if (factor == 1.0).all():
            return found
        text = f"{found.message}, adjusted to the parts of an all-reduce"
        return _Answer(found.times * factor, found.code, text)

    def _alone(self, asked: _Question) -> _Answer | None:
        """Return the times of one layout under the roof of its links; None if unknown."""
        key = (asked.op, asked.scheme, asked.variant, asked.layout, asked.message_bytes.tobytes())
        if key not in asked.shelf.answers:
            asked.shelf.answers[key] = self._under_roof(asked)
        return asked.shelf.answers[key]

    def _under_roof(self, asked: _Question) -> _Answer | None:
        found = _by_fit(asked) or (self._from_elsewhere(asked) if self.tuned else None)
        if found is None:
            return None
        roof = roof_ns(asked.op, asked.layout, asked.message_bytes, asked.device)
        time = np.maximum(found.times[0], roof)
        return replace(found, times=np.stack((time, found.times[1], np.maximum(found.times[2], time))))

    def _from_elsewhere(self, asked: _Question) -> _Answer | None:
        """Return what was measured elsewhere or follows from the links, but no less than the group's part on
        nearer links takes after the network has brought the first bytes.
        """
        found = _by_carrying(asked) or self._by_kin(asked) or _by_algorithm(asked) or _by_data_sheet(asked)
        inner = _inner(asked)
        if found is None or inner is None:
            return found
        # A gather hands on the whole buffer inside a node, wherever its shards come from.
        more = (
            asked.layout.ranks / inner.ranks if asked.op == "all_gather" and asked.layout.nodes > 1 else 1.0
        )
        part = self._answer(replace(asked, layout=inner, message_bytes=asked.message_bytes * more))
        if part is None:
            return found
        least = part.times[0]
        if (link := asked.device.link("scale_out")) is not None:
            rate = link.bandwidth_bytes_per_s
            least = least + fill_ns(asked.op, asked.layout, asked.message_bytes, rate)
        return replace(found, times=found.times * np.maximum(least / found.times[0], 1.0))

    def _by_kin(self, asked: _Question) -> _Answer | None:
        """What the nearest measured devices make of this one's links. Across nodes none but siblings lend
        theirs, since networks are a cluster's; but for permutes, of which no model is known.
        """
        near = kin_of(asked.device, asked.layout, self.kin)
        tiers = KINSHIPS if asked.layout.nodes == 1 or asked.op == "permute" else KINSHIPS[:1]
        for tier in tiers:
            names = [name for name, found in near if found == tier]
            said = {name: parts for name in names if (parts := _by_other(asked, load_device(name)))}
            if said:
                return _of_kin(asked, tier, said)
        return None


def _agreement(times: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Return factors on the times of an all-reduce and its parts after which they obey the rule of parts."""
    reduced, scatter, gather = (times[op] for op in _PARTS)
    ratio = scatter / gather
    nearer = np.sqrt(np.maximum(np.maximum(ratio, 1 / ratio) / _PARTS_APART, 1.0))
    later = ratio > 1.0
    scatter_by = np.where(later, 1 / nearer, nearer)
    both = scatter * scatter_by + gather / scatter_by
    less = np.sqrt(np.maximum(reduced / (_WHOLE_OF_PARTS * both), 1.0))
    factors = (1 / less, scatter_by * less, less / scatter_by)
    return dict(zip(_PARTS, factors, strict=True))


def _layouts(ops: Operations, device: Device) -> Iterator[tuple[Layout, IntArray]]:
    """The distinct layouts of more than one rank and the rows of each. Where nobody says how ranks lie over
    nodes, there are as few as the scale-up domain allows.
    """
    ranks, per_node = ops.dim("ranks"), ops.dim("ranks_per_node")
    link = device.link("scale_up")
    domain = 0 if link is None else link.devices_per_domain
    fewest = np.ceil(ranks / domain) if domain > 0 else np.ones(len(ranks))
    nodes = np.where(np.isnan(per_node), fewest, np.ceil(ranks / np.maximum(per_node, 1)))
    pairs = np.stack((ranks, nodes), axis=1)
    known = np.isfinite(pairs).all(axis=1) & np.isfinite(ops.dim("message_bytes")) & (ranks > 1)
    distinct, place = np.unique(pairs[known], axis=0, return_inverse=True)
    rows = np.flatnonzero(known)
    for number, (count, spread) in enumerate(distinct.tolist()):
        yield Layout(int(count), int(spread)), rows[place.reshape(-1) == number]


def _inner(asked: _Question) -> Layout | None:
    """The ranks of one node, or those that its own links hold where there are more; None of one alone."""
    held = asked.layout.per_node
    if asked.layout.nodes == 1:
        domains = [each.devices_per_domain for each in asked.device.links if each.kind == "scale_up"]
        held = max((each for each in domains if each < held), default=0)
    return Layout(held, 1) if held > 1 and asked.op != "permute" else None


# Fits of the device itself.


def _preferred(fits: Iterable[Fit], scheme: str, library: str, *, exact: bool) -> list[Fit]:
    """Fits that may cover a class, the best first: the number format asked before one as wide before any (a
    collective moves bytes), the default, the most samples. A framework's own kernels only where they are
    named or nothing else was fitted.
    """
    wide = _bits(scheme)
    mine = [fit for fit in fits if fit.form == SEGMENTS]
    mine = [fit for fit in mine if (fit.variant == library if exact else library in fit.variant)]
    general = [fit for fit in mine if not fit.variant.startswith(_OWN)]
    return sorted(
        mine if library else general or mine,
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


def _exact(asked: _Question, device: Device) -> list[Fit]:
    """Fits of the variant that is asked, or of the library where none is."""
    fits = asked.shelf.fits(device, asked.op)
    return _preferred(fits, asked.scheme, asked.variant or asked.library, exact=bool(asked.variant))


def _alike(asked: _Question, device: Device) -> list[Fit]:
    """Fits that may be carried to a class that names a variant: of other releases of it, then any."""
    fits = asked.shelf.fits(device, asked.op)
    if not asked.variant:
        return _preferred(fits, asked.scheme, asked.library, exact=False)
    name = asked.variant.partition(" ")[0] + " "
    same = _preferred(fits, asked.scheme, name, exact=False)
    return [*same, *_preferred(fits, asked.scheme, "", exact=False)]


def _speaking(asked: _Question, fit: Fit, device: Device) -> Lines:
    """Return the lines of a fit that apply to the links of its device: all of them where it is named."""
    lines = asked.shelf.lines(fit, device)
    if asked.variant or asked.library:
        return lines
    held = {
        layout: line
        for layout, line in lines.by_layout.items()
        if (layout.nodes == 1 or asked.clusters) and _is_on_stated_links(lines, layout, device)
    }
    return lines if len(held) == len(lines.by_layout) else replace(lines, by_layout=held)


def _is_on_stated_links(lines: Lines, layout: Layout, device: Device) -> bool:
    """Return True if the largest message agrees with the links within the interval of their model."""
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
        kind = _KINDS.get(lines.op, CollectiveKind.UNKNOWN)
        beyond = np.array([layout.nodes > 1])
        model = collective_time_ns(np.array([int(kind)]), ranks, size, device, beyond_node=beyond)
    measured = float(lines.by_layout[layout].time_ns(size)[0])
    spread = OF_MODEL if layout.nodes > 1 else OF_MODEL.beside(OF_HOST[wiring])
    return bool(np.isnan(model).any()) or measured <= float(model[0]) * exp(spread.above)


def _by_fit(asked: _Question) -> _Answer | None:
    """What a fit of the device says of a layout that it was fitted on, or of one between two."""
    for fit in _exact(asked, asked.device):
        lines = _speaking(asked, fit, asked.device)
        time = lines.inside(asked.layout, asked.message_bytes)
        if time is not None:
            between = BETWEEN[asked.wiring].times(lines.distance(asked.layout))
            times = _beyond(widened(_banded(fit, time), between), lines, asked)
            return _Answer(times, _FITTED, f"fitted for {fit.variant} in {fit.scheme}")
    return None


def _by_carrying(asked: _Question) -> _Answer | None:
    """What a fit of the device says of a layout beyond, or of another release of its library."""
    for fit in (*_exact(asked, asked.device), *_alike(asked, asked.device)):
        lines = _speaking(asked, fit, asked.device)
        parts = lines.parts(asked.layout, asked.message_bytes, asked.device)
        if parts is None:
            continue
        spread = PER_DOUBLING[asked.wiring].times(parts.doublings)
        if asked.variant not in ("", fit.variant):
            spread = spread.beside(OF_RELEASE)
        times = _beyond(widened(_banded(fit, parts.time_ns), spread), lines, asked)
        text = f"carried from other ranks of {fit.variant} in {fit.scheme}"
        return _Answer(times, "collectives.carried", text)
    return None


def _banded(fit: Fit, time_ns: FloatArray) -> FloatArray:
    time_ns = np.maximum(time_ns, _LEAST_NS)
    return with_bands(fit, time_ns) if fit.bands else _certain(time_ns, NO_BAND)


def _certain(time_ns: FloatArray, spread: Spread) -> FloatArray:
    return widened(np.stack((time_ns, time_ns, time_ns)), spread)


def _beyond(times: FloatArray, lines: Lines, asked: _Question) -> FloatArray:
    """Wider by the octaves that messages leave the sizes that were fitted on."""
    size = np.maximum(asked.message_bytes, 1.0)
    octaves = np.maximum(np.log2(size / lines.most), np.log2(lines.least / size))
    return widened(times, PER_OCTAVE[asked.wiring], np.maximum(octaves, 0.0))


# Devices that another is like.


def kin_of(device: Device, layout: Layout, names: Iterable[str] = MEASURED) -> list[tuple[str, str]]:
    """Measured devices by name with their kinship to another, as far as a layout goes: a ``sibling`` is of
    the same vendor and generation on links alike, a ``family`` has links of the same kind, topology and
    vendor; of others whose links are of the same kind the ``link data`` tell.
    """
    link = link_inside(device, layout.per_node)
    found: list[tuple[str, str]] = []
    for name in names:
        other = load_device(name)
        theirs = other.link("scale_up") or other.link("pcie")
        if name in (device.name, device.fits_of) or other.kind != device.kind:
            continue
        if link is not None and theirs is not None and theirs.kind == link.kind:
            found.append((name, _kinship(device, link, other, theirs)))
    return found


def _kinship(device: Device, link: Link, other: Device, theirs: Link) -> str:
    if other.vendor != device.vendor or theirs.topology != link.topology:
        return "link data"
    is_same = theirs.bandwidth_bytes_per_s == link.bandwidth_bytes_per_s
    return "sibling" if is_same and _generation(other) == _generation(device) else "family"


def _generation(device: Device) -> str:
    return device.family.partition(" ")[0]


def _by_other(asked: _Question, other: Device) -> Parts | None:
    """What the fits of another device make of the links of this one; None where its own are not stated."""
    if link_of(other, asked.layout) is None:
        return None
    for fit in _alike(asked, other):
        lines = _speaking(asked, fit, other)
        parts = lines.parts(asked.layout, asked.message_bytes, asked.device)
        if parts is not None:
            return parts
    return None


def _of_kin(asked: _Question, tier: str, said: Mapping[str, Parts]) -> _Answer:
    """The geometric mean of generations; beyond siblings, of that and NCCL's own model: on the devices that
    were measured they err less together (medians 15-27 %) than either (15-41 and 16-32 %).
    """
    families: dict[str, list[FloatArray]] = {}
    for name, parts in said.items():
        logs = np.log(np.maximum(parts.time_ns, _LEAST_NS))
        families.setdefault(_generation(load_device(name)), []).append(logs)
    each = np.stack([np.stack(logs).mean(axis=0) for logs in families.values()])
    time: FloatArray = np.exp(each.mean(axis=0))
    doublings = min(parts.doublings for parts in said.values())
    spread = OF_KIN[tier].beside(PER_DOUBLING[asked.wiring].times(doublings))
    if tier != "sibling":
        model = _tuned(asked).duration_ns
        time = np.where(np.isnan(model), time, np.sqrt(time * model))
        spread = spread.beside(_of_host(asked))
    text = f"as fitted for {', '.join(said)} ({tier}), on links of its own"
    return _Answer(_certain(time, spread), "collectives.kin", text)


def _of_host(asked: _Question) -> Spread:
    """Two ranks share nothing of their host with others."""
    is_pair = asked.wiring == "host" and asked.layout.ranks == 2
    return Spread(0.0, 0.0) if is_pair else OF_HOST[asked.wiring]


# Models without lines.


def _tuned(asked: _Question) -> Tuned:
    count = len(asked.message_bytes)
    ranks, nodes = np.full(count, float(asked.layout.ranks)), np.full(count, float(asked.layout.nodes))
    return tuned_times(asked.op, ranks, nodes, asked.message_bytes, asked.device)


def _by_algorithm(asked: _Question) -> _Answer | None:
    """Return NCCL's model times the ratio that was fitted for the device inside one node. Across nodes the
    model stands as it is: the ratio is of other links.
    """
    tuned = _tuned(asked)
    if np.isnan(tuned.duration_ns).any():
        return None
    fits = asked.shelf.fits(asked.device, asked.op)
    fit = next((each for each in fits if each.form == TUNED and each.variant == ANY), None)
    is_inside = asked.layout.nodes == 1 and fit is not None and not isnan(fit.value("ratio"))
    ratio = fit.value("ratio") if fit is not None and is_inside else 1.0
    numbers: list[int] = np.unique(tuned.algorithm).tolist()
    names = ", ".join(ALGORITHMS[number] for number in numbers)
    times = _certain(tuned.duration_ns * ratio, OF_MODEL.beside(_of_host(asked)))
    return _Answer(times, "collectives.tuned", f"NCCL's model of {names}, times {ratio:.3g}")


def _by_data_sheet(asked: _Question) -> _Answer | None:
    """Latencies, and bytes over the bandwidth of the links."""
    kind, count = _KINDS.get(asked.op, CollectiveKind.UNKNOWN), len(asked.message_bytes)
    time = collective_time_ns(
        np.full(count, int(kind)),
        np.full(count, float(asked.layout.ranks)),
        asked.message_bytes,
        asked.device,
        beyond_node=np.full(count, asked.layout.nodes > 1),
    )
    if np.isnan(time).any():
        return None
    time = np.maximum(asked.device.launch_overhead_ns + time, _LEAST_NS)
    times = _certain(time, OF_MODEL.beside(_of_host(asked)))
    return _Answer(times, "collectives.data-sheet", "latencies and bandwidths of the data sheet")
