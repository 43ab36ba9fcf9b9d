"""The time of collectives and messages on a system: what was measured on its device, as its links differ.

What a device's fits say of a layout (:class:`hespas.estimators.collectives.Collectives`: measured tables,
what is known of the nearest devices, NCCL's model) is of the device's own links, as its file states them. On
those, laid out evenly, it stands. Otherwise it is taken times what :mod:`hespas.simulator.network.algorithms`
make of the system's levels over what they make of the device's. Where nobody measured or modelled anything
(TPUs, loopbacks), the algorithms alone speak. Nothing beats the links of the system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import nan, prod
from typing import NamedTuple

import numpy as np
from msgspec import structs

from hespas.estimators.collective_links import Layout, fill_ns
from hespas.estimators.collectives import Collectives
from hespas.graph import CollectiveKind, Diagnostics
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import InvariantError
from hespas.hardware import Device, Dimension, Link, System, load_device
from hespas.operations import Labels, Operations
from hespas.simulator.network.algorithms import Level, fastest_ns, least_ns, levels_of, message_ns
from hespas.simulator.network.placement import Footprint, footprint_of

__all__ = ["Network", "collective_ns"]

_MODEL_SPREAD = (0.6, 2.0)
"""Below and above what algorithms say alone, as data sheets are off in the estimator of collectives."""
_KINDS: Mapping[str, CollectiveKind] = {each.name.lower(): each for each in CollectiveKind}
_DATA_SHEET = "collectives.data-sheet"
_TUNED = "collectives.tuned"
_MESSAGE = "permute"


def collective_ns(
    system: System,
    kind: CollectiveKind,
    message_bytes: FloatArray,
    members: IntArray,
    device: Device | None = None,
) -> FloatArray:
    """The time [ns] of collectives of one group of ranks that has the network to itself, shape
    ``(messages,)``; ``message_bytes`` as Chakra counts them. ``device`` stands in for the system's.
    """
    named = load_device(system.device) if device is None and system.device else device
    network = Network(system, named)
    place = footprint_of(network.system, members)
    time_ns: FloatArray = network.collectives(kind.name.lower(), "", place, message_bytes)[0]
    return time_ns


class _Asked(NamedTuple):
    """A collective in the words of the estimator."""

    op: str
    scheme: str
    ranks: int
    per_node: int

    def operations(self, message_bytes: FloatArray) -> Operations:
        """Messages of it."""
        count = len(message_bytes)
        blank = np.full(count, nan)
        return Operations(
            kind=Labels.constant("collective", count),
            op=Labels.constant(self.op, count),
            scheme=Labels.constant(self.scheme, count),
            variant=Labels.constant("", count),
            dims={
                "ranks": np.full(count, float(self.ranks)),
                "message_bytes": message_bytes,
                "ranks_per_node": np.full(count, float(self.per_node)),
            },
            flops=blank,
            transcendentals=blank,
            bytes_moved=blank,
        )


class _Measured(NamedTuple):
    """Times and their 90 % interval [ns], shape ``(3, messages)``, on ``links``."""

    times: FloatArray
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Network:
    """A sized system, and the device whose measurements speak (None: nobody's). ``library`` names whose fits
    count (``nccl 2.29.2``, a part is enough; empty: the device's default).
    """

    system: System
    device: Device | None = None
    library: str = ""

    def __post_init__(self) -> None:
        """Check that the system has a size."""
        if self.system.devices < 0:
            raise InvariantError(f"{self.system.name} has no size yet")

    def collectives(
        self,
        op: str,
        scheme: str,
        place: Footprint,
        message_bytes: FloatArray,
        diagnostics: Diagnostics | None = None,
    ) -> FloatArray:
        """Times and their 90 % interval [ns], shape ``(3, messages)``, of messages of one operation in one
        number format on groups of one footprint; NaN for operations without a rule.
        """
        if place.ranks <= 1:
            return np.zeros((3, len(message_bytes)))
        kind, levels = _KINDS.get(op, CollectiveKind.UNKNOWN), levels_of(self.system, place)
        own = _Parts.of(partial(fastest_ns, kind, levels), message_bytes)
        asked = _Asked(op, scheme, place.ranks, place.members[0])
        said = self._measured(asked, message_bytes, diagnostics)
        if said is None:
            return self._no_less_than_inside(self._alone(own.time_ns), op, scheme, place, message_bytes)
        theirs = _Parts.of(partial(fastest_ns, kind, self._levels_of(said.links, asked)), message_bytes)
        return np.maximum(_scaled(said.times, own, theirs), least_ns(kind, levels, message_bytes))

    def _no_less_than_inside(
        self, times: FloatArray, op: str, scheme: str, place: Footprint, message_bytes: FloatArray
    ) -> FloatArray:
        """Return times that are not below those of the group's part inside one node, which starts after the
        network has brought the first bytes. Nodes are units of a first dimension that is not a ring.
        """
        inner = place.members[0]
        if not 1 < inner < place.ranks or not self._links:
            return times
        alone = (1,) * (len(place.members) - 1)
        part = Footprint(inner, (inner, *alone), place.stride, (place.crowd[0], *alone))
        more = place.ranks / inner if op == "all_gather" else 1.0
        rate = self.system.dimensions[1].bandwidth_bytes_per_s
        first = fill_ns(op, Layout(place.ranks, -(-place.ranks // inner)), message_bytes, rate)
        return np.fmax(times, self.collectives(op, scheme, part, message_bytes * more) + first)

    def messages(
        self,
        scheme: str,
        away: Sequence[int],
        message_bytes: FloatArray,
        diagnostics: Diagnostics | None = None,
    ) -> FloatArray:
        """The same of messages from one rank to another so far away along each dimension."""
        if not any(away):
            return np.zeros((3, len(message_bytes)))
        own = _Parts.of(partial(message_ns, self.system, away), message_bytes)
        asked = _Asked(_MESSAGE, scheme, 2, 1 if any(away[1:]) else 2)
        said = self._measured(asked, message_bytes, diagnostics)
        if said is None:
            return self._alone(own.time_ns)
        there = (0, 1) if asked.per_node == 1 else (1, 0)
        theirs = _Parts.of(partial(message_ns, self._as_system(said.links), there), message_bytes)
        return np.maximum(_scaled(said.times, own, theirs), own.moved_ns)

    def _alone(self, time_ns: FloatArray) -> FloatArray:
        """What algorithms say, after the launch of a kernel."""
        launch_ns = 0.0 if self.device is None else float(np.nan_to_num(self.device.launch_overhead_ns))
        whole_ns = time_ns + launch_ns
        return np.stack((whole_ns, whole_ns * _MODEL_SPREAD[0], whole_ns * _MODEL_SPREAD[1]))

    @cached_property
    def _links(self) -> tuple[Link, ...]:
        """The links of the device that stand for the system's first two dimensions, by its own figures and
        reaching as far as the system's; none where nobody has measured such links.
        """
        device, dimensions = self.device, self.system.dimensions
        if device is None or device.kind != "gpu" or dimensions[0].topology == "ring":
            return ()
        inside = device.link("scale_up") or device.link("pcie")
        if inside is None:
            return ()
        reach = structs.replace(inside, devices_per_domain=max(dimensions[0].size, inside.devices_per_domain))
        outside = device.link("scale_out") or (_as_link(dimensions[1]) if len(dimensions) > 1 else None)
        return (reach,) if outside is None else (reach, outside)

    def _measured(
        self, asked: _Asked, message_bytes: FloatArray, diagnostics: Diagnostics | None
    ) -> _Measured | None:
        """Return the answer of the estimator of collectives for the device's own links. Where that is the
        model of an algorithm, ask again for links as fast as the system's, which decide on the algorithm.
        None where the estimator has no more than a data sheet, or not all.
        """
        if self.device is None or not self._links or (len(self._links) == 1 and asked.per_node < asked.ranks):
            return None
        said, found = self._said(self._links, asked, message_bytes)
        if _TUNED in found.counts() and asked.per_node < asked.ranks and len(self.system.dimensions) > 1:
            inside, outside = self._links[0], self._links[-1]
            bandwidth = self.system.dimensions[1].bandwidth_bytes_per_s
            if bandwidth != outside.bandwidth_bytes_per_s:
                links = (inside, structs.replace(outside, bandwidth_bytes_per_s=bandwidth))
                said, found = self._said(links, asked, message_bytes, clusters=False)
        if _DATA_SHEET in found.counts() or np.isnan(said.times).any():
            return None
        if diagnostics is not None:
            diagnostics.extend(found)
        return said

    def _said(
        self, links: tuple[Link, ...], asked: _Asked, message_bytes: FloatArray, *, clusters: bool = True
    ) -> tuple[_Measured, Diagnostics]:
        """Return the answer of the estimator of collectives for the device on some links."""
        if self.device is None:
            raise InvariantError("no device to ask about")
        kinds = {link.kind for link in links}
        others = (link for link in self.device.links if link.kind not in kinds)
        device, found = replace(self.device, links=(*links, *others)), Diagnostics()
        model = Collectives(library=self.library, clusters=clusters)
        said = model.predict(asked.operations(message_bytes), device, found)
        return _Measured(np.stack((said.duration_ns, said.low_ns, said.high_ns)), links), found

    def _as_system(self, links: tuple[Link, ...], nodes: int = 2) -> System:
        """Return links as a system of up to two dimensions, of so many nodes."""
        first, *rest = links
        inside = _as_dimension(first, self.system.dimensions[0], first.devices_per_domain)
        dimensions = (inside, *(_as_dimension(link, None, nodes) for link in rest))
        return replace(self.system, dimensions=dimensions, devices=prod(each.size for each in dimensions))

    def _levels_of(self, links: tuple[Link, ...], asked: _Asked) -> tuple[Level, ...]:
        """Return the levels of as many ranks on some links, all of whose neighbours send, too."""
        nodes = -(-asked.ranks // asked.per_node)
        whole = self._as_system(links, nodes)
        counts = (asked.per_node, nodes)[: len(whole.dimensions)]
        crowd = (1, whole.dimensions[0].size)[: len(whole.dimensions)]
        return levels_of(whole, Footprint(asked.ranks, counts, (1,) * len(counts), crowd))


def _as_link(each: Dimension) -> Link:
    return Link(
        name=each.name,
        kind="scale_out",
        bandwidth_bytes_per_s=each.bandwidth_bytes_per_s,
        latency_ns=each.latency_ns,
        topology="switch",
        links_per_device=each.links_per_device,
        devices_per_domain=-1,
        source=each.source,
        latency_source=each.latency_source,
    )


def _as_dimension(link: Link, like: Dimension | None, size: int) -> Dimension:
    """A link of the device; what adds in the system's network does in its own (measured times have that)."""
    return Dimension(
        name=link.name,
        topology="fully_connected" if link.topology == "fully_connected" else "switch",
        size=size,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        latency_ns=link.latency_ns,
        links_per_device=max(link.links_per_device, 1),
        source=link.source,
        latency_source=link.latency_source,
        reduction="" if like is None else like.reduction,
        reduction_share=nan if like is None else like.reduction_share,
    )


class _Parts(NamedTuple):
    """Times of messages on links alone [ns]: latencies of an empty one, and the rest, which moves bytes."""

    latency_ns: FloatArray
    moved_ns: FloatArray

    @classmethod
    def of(cls, model: Callable[[FloatArray], FloatArray], message_bytes: FloatArray) -> _Parts:
        """Return the parts of a model's times."""
        latency_ns = model(np.zeros(len(message_bytes)))
        return cls(latency_ns, model(message_bytes) - latency_ns)

    @property
    def time_ns(self) -> FloatArray:
        """Both parts together."""
        return self.latency_ns + self.moved_ns


def _scaled(said: FloatArray, own: _Parts, theirs: _Parts) -> FloatArray:
    """Return measured times on links of other figures: scaled by what moving bytes takes on the system's over
    the device's own, plus the difference of latencies. Unchanged where both agree or no rule is known.
    """
    later_ns = np.nan_to_num(own.latency_ns - theirs.latency_ns)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (own.moved_ns + theirs.latency_ns) / theirs.time_ns
    same = (own.moved_ns == theirs.moved_ns) | ~(theirs.time_ns > 0) | np.isnan(ratio)
    return np.maximum(said * np.where(same, 1.0, ratio) + later_ns, 0.0)
