"""The estimator of collectives: fitted lines of a library where one was measured, NCCL's own model elsewhere.

Between two fitted numbers of ranks the logarithm of the time is linear in that of the ranks. A group of ranks
or a spread over nodes that no fit covers takes the time of NCCL's tuning model, scaled as its fit says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isnan

import numpy as np

from hespas.estimators.by_operation import Prediction, estimate_by_operation
from hespas.estimators.collectives.algorithms import ALGORITHMS, SEGMENTS, Layout, Line, lines_of, tuned_times
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.columns import BoolArray, FloatArray
from hespas.hardware import ANY, Device, Fit
from hespas.operations import Operations, find_scheme

__all__ = ["TUNED", "Collectives"]

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
    """The estimator. ``library`` names whose fits may speak where operations name none (``nccl 2.29.2``, a
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
        """The time of one execution of each collective; NaN for all else and where nothing speaks. O(ops)."""
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
    """Fits that may speak, the best first: those of a general library before a framework's own, the number
    format asked before one as wide before any (a collective moves bytes), the default, the most samples.
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
    return _with_bands(fit, np.where(time > 0, time, np.nan), beyond)


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


def _with_bands(fit: Fit, time: FloatArray, beyond: FloatArray) -> FloatArray:
    """A time with the interval of its band, wider with every doubling beyond the fitted sizes."""
    if not fit.bands:
        return np.stack((time, np.full(len(time), np.nan), np.full(len(time), np.nan)))
    band = np.searchsorted(np.array([each.up_to_ns for each in fit.bands]), time)
    band = np.minimum(band, len(fit.bands) - 1)
    widening = 1 + _PER_DOUBLING * np.maximum(beyond - _MARGIN, 0.0)
    low = np.array([each.low for each in fit.bands])[band] ** widening
    high = np.array([each.high for each in fit.bands])[band] ** widening
    return np.stack((time, time * np.minimum(low, 1.0), time * np.maximum(high, 1.0)))


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
        return _with_bands(fit, time, np.zeros(len(time)))
    return np.stack((time, time * _UNFITTED[0], time * _UNFITTED[1]))
