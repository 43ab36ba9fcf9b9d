"""Parts of the learned models (the rows that one model is fitted to), candidate hyperparameters, and the
fitting of trees.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.learned.ensemble import FAMILIES, Forest, features_of
from hespas.estimators.learned.extrapolation import code_columns
from hespas.fitting.rows import is_possible
from hespas.fitting.statistics import one_thread
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import MissingExtraError, UsageError
from hespas.hardware import Device, device_names, named_device
from hespas.measurements import Measurements
from hespas.operations import KINDS, Labels

__all__ = [
    "EXPERTS",
    "FEW",
    "HEADS",
    "PARTS",
    "ROBUST",
    "SMALL",
    "WEIGHTS",
    "BoostingForm",
    "LearnedPart",
    "Loss",
    "TrainingRows",
    "constant",
    "grow",
    "library_version",
    "rising",
    "rows_for",
    "rows_of_part",
    "weighted_sum",
]

Loss = Literal["squared_error", "absolute_error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostingForm:
    """Hyperparameters of boosted trees; ``columns`` is the fraction of the columns that each split may
    use.
    """

    trees: int
    leaves: int
    learning_rate: float
    least_rows: int = 20
    loss: Loss = "squared_error"
    columns: float = 1.0


FEW = BoostingForm(trees=200, leaves=15, learning_rate=0.1, least_rows=10)
ROBUST = BoostingForm(
    trees=300, leaves=15, learning_rate=0.08, least_rows=10, loss="absolute_error", columns=0.4
)
_COARSE = replace(ROBUST, trees=400, leaves=31, learning_rate=0.06, least_rows=20)
"""No leaf of few rows, because the times of a few large shapes extrapolate badly."""
SMALL = BoostingForm(trees=150, leaves=31, learning_rate=0.15)
_LARGE = BoostingForm(trees=400, leaves=63, learning_rate=0.12)
_VERSION = re.compile(r" v?\d[\w.]*")
_RISING = frozenset({"loss", "row_loss"})
"""Columns with which the time of stream operations can only rise: the loss in the last wave of simple
kernels. Matmuls use other kernels for other shapes, so their time may fall with such a column.
"""
_LARGEST_LEAF = 32767
_ONE_THREAD_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class LearnedPart:
    """Definition of the training set of one learned model: the rows of one table that have some kinds and
    number formats (empty: all).

    ``overhead_ns`` is the constant part of the base time. ``forms`` are hyperparameters that are compared on
    held-out groups. A group is a layer: rows with equal sizes in ``layer`` (empty: all sizes) and any number
    of tokens. Layers are held out as a whole, because a new layer was not measured with any number of tokens.
    """

    name: str
    table: str
    kinds: tuple[str, ...]
    overhead_ns: float
    forms: tuple[BoostingForm, ...]
    schemes: tuple[str, ...] = ()
    layer: tuple[str, ...] = ()

    @property
    def support(self) -> tuple[str, ...]:
        """Return the names of the size dimensions of the part's kinds, without repetition."""
        return tuple(dict.fromkeys(name for kind in self.kinds for name in KINDS[kind]))


_GEMM = "aiconfigurator_gemm"
_BIG = (SMALL, _LARGE)
_FEW = (FEW, ROBUST)
_ANY = (FEW, ROBUST, SMALL)
WEIGHTS = ("n", "k")
HEADS = ("batch", "heads", "kv_heads", "head_dim")
EXPERTS = ("hidden", "inter", "topk", "experts", "tensor_parallel", "expert_parallel")

# name, table, kinds, overhead [ns], forms
PARTS: tuple[LearnedPart, ...] = (
    LearnedPart("gemm-bf16", _GEMM, ("matmul",), 3e3, _BIG, schemes=("bf16",), layer=WEIGHTS),
    LearnedPart("gemm-fp8", _GEMM, ("matmul",), 12e3, _BIG, schemes=("fp8",), layer=WEIGHTS),
    LearnedPart("gemm-fp8-block", _GEMM, ("matmul",), 8e3, _BIG, schemes=("fp8_block",), layer=WEIGHTS),
    LearnedPart("gemm-nvfp4", _GEMM, ("matmul",), 8e3, _BIG, schemes=("nvfp4",), layer=WEIGHTS),
    LearnedPart(
        "gemm-weight-only", _GEMM, ("matmul",), 5e3, _BIG, schemes=("int8_wo", "int4_wo", "sq"), layer=WEIGHTS
    ),
    LearnedPart("mla-products", "aiconfigurator_mla_bmm", ("matmul",), 3e3, _ANY, layer=("batch", "m")),
    LearnedPart("gemm-f16", "vidur_compute", ("matmul",), 8e3, _BIG, layer=WEIGHTS),
    LearnedPart("gemm-f32", "neusight_perop", ("matmul",), 1e4, _BIG),
    LearnedPart("gemm-aiter", "aiter_gemm", ("matmul",), 5e3, _BIG, layer=WEIGHTS),
    LearnedPart("gemm-tpu", "tpuv4_matmul", ("matmul",), 1e3, (FEW, _COARSE)),
    LearnedPart("conv-f32", "neusight_conv", ("convolution",), 1e4, _BIG, layer=WEIGHTS),
    *(
        LearnedPart(
            f"attention-{what}",
            f"aiconfigurator_attention_{what}",
            (f"attention.{what}",),
            overhead_ns,
            _BIG,
            layer=HEADS,
        )
        for what, overhead_ns in (("context", 5e3), ("generation", 6e3), ("encoder", 5e3))
    ),
    LearnedPart("moe", "aiconfigurator_moe", ("moe",), 2e4, _BIG, layer=EXPERTS),
    LearnedPart("moe-aiter", "aiter_fused_moe", ("moe",), 2e4, _ANY, layer=EXPERTS),
    LearnedPart("vector-f32", "neusight_perop", ("vector", "normalization"), 5e3, _BIG),
    LearnedPart(
        "vector-f16", "vidur_compute", ("vector", "normalization", "gather"), 5e3, _BIG, layer=("columns",)
    ),
    LearnedPart("vector-tpu", "tpuv4_nongemm", ("vector", "normalization", "pooling"), 1e3, _FEW),
    LearnedPart("quantize", "aiconfigurator_quantize", ("quantize",), 3e3, _BIG),
)
"""The models that ship with the package."""


def rows_of_part(part: LearnedPart, table: Measurements) -> IntArray:
    """Return the numbers of the table rows that belong to a part (one learned model); empty if the part is of
    another table.
    """
    if not table.name.startswith(part.table):
        return np.empty(0, np.int64)
    rows = table.ops.kind.where(*part.kinds)
    return np.intersect1d(rows, table.ops.scheme.where(*part.schemes)) if part.schemes else rows


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRows:
    """Rows of one part (:class:`LearnedPart`) with the input columns of the trees.

    ``measured`` has only rows whose columns are known (a device file and a peak exist). ``table`` has shape
    ``(rows, len(names))``. ``sheet_ns`` has the data-sheet times. ``ratio`` is log(duration / base time); the
    base time is the data-sheet time before :func:`~hespas.fitting.learned_bases.with_bases` is called.
    ``devices`` maps names to device files; ``codes`` are the numbers of labels.
    """

    measured: Measurements
    names: tuple[str, ...]
    table: NDArray[np.float32]
    sheet_ns: FloatArray
    ratio: FloatArray
    devices: Mapping[str, Device]
    codes: Mapping[str, Mapping[str, float]]

    def of_devices(self, names: tuple[str, ...]) -> BoolArray:
        """Return a mask of the rows that were measured on the devices ``names``."""
        is_of_devices = np.zeros(len(self.ratio), np.bool_)
        is_of_devices[self.measured.hardware.where(*names)] = True
        return is_of_devices

    def by_device(self) -> Iterator[tuple[str, Device, IntArray]]:
        """Yield the name, the device file and the rows of each device, in the order of names."""
        for name, device in sorted(self.devices.items()):
            yield name, device, self.measured.hardware.where(name)

    def take(self, rows: IntArray) -> TrainingRows:
        """Return the training rows with only the given rows."""
        return replace(
            self,
            measured=self.measured.take(rows),
            table=self.table[rows],
            sheet_ns=self.sheet_ns[rows],
            ratio=self.ratio[rows],
        )

    def columns(self, names: tuple[str, ...]) -> NDArray[np.float32]:
        """Return the columns ``names`` in this order."""
        return self.table[:, [self.names.index(name) for name in names]]


def rising(part: LearnedPart, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the indices of the columns in which a larger value never shortens the time. Trees are
    constrained in this way only for streaming operations (over rows and columns).
    """
    is_stream = FAMILIES[part.kinds[0]] == "stream"
    return tuple(index for index, name in enumerate(names) if is_stream and name in _RISING)


def rows_for(
    part: LearnedPart, measured: Measurements, files: Mapping[str, Device] | None = None
) -> TrainingRows:
    """Return the training rows of one part with their input columns. O(rows).

    Constant columns and rows with impossible times are left out. ``files`` are the devices by their names in
    the table (None: the devices that ship with the package).
    """
    available = set(device_names()) if files is None else set(files)
    used = [name for name in measured.hardware.used() if name in available]
    if not used:
        raise UsageError(
            f"{part.name}: no row is of a device that has a hardware file",
            hint=f"use one of the devices {', '.join(list(available)[:8])}",
        )
    devices = {name: named_device(name) if files is None else files[name] for name in used}
    measured = measured.take(np.sort(measured.hardware.where(*used)))
    family = FAMILIES[part.kinds[0]]
    names: tuple[str, ...] = ()
    table, base = np.empty((0, 0), np.float32), np.full(len(measured), np.nan)
    for name, device in devices.items():
        of_device = measured.hardware.where(name)
        features = features_of(family, measured.ops.take(of_device), device, overhead_ns=part.overhead_ns)
        if not names:
            names = features.names
            table = np.full((len(measured), len(names)), np.nan, np.float32)
        table[of_device], base[of_device] = features.columns, features.base_ns
        base[of_device[~is_possible(measured.take(of_device), device)]] = np.nan
    usable = np.flatnonzero(np.isfinite(table).all(axis=1) & np.isfinite(base))
    measured, table = measured.take(usable), table[usable]
    ratio = np.log(measured.duration_ns / base[usable])
    labels = {"variant": measured.ops.variant, "scheme": measured.ops.scheme, "op": measured.ops.op}
    codes = {
        name: _codes_by_ratio(column, ratio, joins_versions=name == "variant")
        for name, column in labels.items()
    }
    coded = code_columns(codes, labels)
    table = np.concatenate((table, *(column[:, None] for column in coded.values())), axis=1, dtype=np.float32)
    varies = np.flatnonzero(np.ptp(table, axis=0) > 0).tolist() if len(table) else []
    names = (*names, *coded)
    return TrainingRows(
        measured,
        tuple(names[index] for index in varies),
        np.ascontiguousarray(table[:, varies]),
        base[usable],
        ratio,
        devices,
        codes,
    )


def _codes_by_ratio(labels: Labels, ratio: FloatArray, *, joins_versions: bool) -> dict[str, float]:
    """Return a number for each label, in ascending order of the mean ``ratio`` of its rows. If
    ``joins_versions`` is True, variants that differ only in their version get the same number.
    """
    used = labels.used()
    if not used:
        return {}
    plain = {name: _VERSION.sub("", name) if joins_versions else name for name in used}
    groups = sorted(set(plain.values()))
    group_of = np.array([groups.index(plain.get(name, groups[0])) for name in labels.names])
    group: IntArray = group_of[labels.row]
    sums = np.bincount(group, ratio, len(groups))
    means = sums / np.bincount(group, minlength=len(groups))
    rank = np.argsort(np.argsort(means, kind="stable"), kind="stable")
    return {name: float(rank[groups.index(plain[name])]) for name in sorted(used)}


class _TreePredictor(Protocol):
    nodes: NDArray[np.void]


class _BoostingModel(Protocol):
    _predictors: list[list[_TreePredictor]]
    _baseline_prediction: NDArray[np.float64]

    def __init__(self, **options: object) -> None: ...

    def fit(self, table: NDArray[np.float32], target: FloatArray) -> _BoostingModel: ...


def library_version() -> str:
    """Return the name and version of the library that fits trees."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"scikit-learn {version('scikit-learn')}"
    except PackageNotFoundError as error:
        raise MissingExtraError("growing trees", "learned") from error


def grow(
    table: NDArray[np.float32],
    target: FloatArray,
    form: BoostingForm,
    *,
    seed: int,
    quantile: float | None = None,
    rising: Sequence[int] = (),
) -> Forest:
    """Fit boosted trees that predict ``target`` from ``table``. The loss is the loss of ``form``, or the
    pinball loss if a ``quantile`` is given.

    The prediction never decreases when the value of a column in ``rising`` increases.
    """
    try:
        module = import_module("sklearn.ensemble")
    except ImportError as error:
        raise MissingExtraError("growing trees", "learned") from error
    model = cast("type[_BoostingModel]", module.HistGradientBoostingRegressor)(
        loss=form.loss if quantile is None else "quantile",
        quantile=quantile,
        max_iter=form.trees,
        max_leaf_nodes=form.leaves,
        learning_rate=form.learning_rate,
        min_samples_leaf=form.least_rows,
        l2_regularization=1.0,
        max_features=form.columns,
        monotonic_cst=[int(column in rising) for column in range(table.shape[1])],
        early_stopping=False,
        random_state=seed,
    )
    with one_thread() if len(table) <= _ONE_THREAD_ROWS else nullcontext():
        grown = model.fit(table, target)
    trees = [_TreeColumns(predictor[0].nodes) for predictor in grown._predictors]  # pyright: ignore[reportPrivateUsage]
    return _forest_of(
        table.shape[1],
        _TreeArrays(
            column=np.concatenate([tree.column for tree in trees]),
            threshold=np.concatenate([tree.threshold for tree in trees]),
            first=np.concatenate([tree.first for tree in trees]),
            last=np.concatenate([tree.last for tree in trees]),
            leaf=np.concatenate([tree.leaf for tree in trees]),
            nodes=np.array([len(tree.column) for tree in trees], np.int64),
            leaves=np.array([len(tree.leaf) for tree in trees], np.int64),
        ),
        baseline=float(grown._baseline_prediction.reshape(-1)[0]),  # pyright: ignore[reportPrivateUsage]
    )


def weighted_sum(forests: Sequence[Forest], weights: Sequence[float]) -> Forest:
    """Return the forest that predicts the weighted sum of the predictions of ``forests``.

    The forests have the same input columns and were fitted to the same rows: a column has a limited number of
    distinct splits.
    """
    arrays = [
        _TreeArrays(
            column=forest.column.astype(np.int64),
            threshold=forest.edges[forest.edge_offsets[forest.column] + forest.split],
            first=forest.first.astype(np.int64),
            last=forest.last.astype(np.int64),
            leaf=weight * forest.scale * forest.leaf.astype(np.float64),
            nodes=np.diff(forest.node_offsets).astype(np.int64),
            leaves=np.diff(forest.leaf_offsets).astype(np.int64),
        )
        for forest, weight in zip(forests, weights, strict=True)
    ]
    joined = _TreeArrays(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in arrays])
            for field in fields(_TreeArrays)
        }
    )
    baseline = sum(weight * forest.baseline for forest, weight in zip(forests, weights, strict=True))
    return _forest_of(len(forests[0].edge_offsets) - 1, joined, baseline=baseline)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _TreeArrays:
    """Trees as concatenated arrays (:class:`_TreeColumns`), and the numbers of inner nodes and of leaves of
    each tree.
    """

    column: IntArray
    threshold: NDArray[np.float32]
    first: IntArray
    last: IntArray
    leaf: FloatArray
    nodes: IntArray
    leaves: IntArray


def _forest_of(columns: int, trees: _TreeArrays, *, baseline: float) -> Forest:
    """Return the forest of ``trees``; splits become numbers of the edges that any tree uses."""
    edges = [np.unique(trees.threshold[trees.column == number]) for number in range(columns)]
    split = np.zeros(len(trees.column), np.uint8)
    for number, column_edges in enumerate(edges):
        is_own = trees.column == number
        split[is_own] = np.searchsorted(column_edges, trees.threshold[is_own])
    scale = max(float(np.abs(trees.leaf).max(initial=0.0)), 1e-30) / _LARGEST_LEAF

    def offsets(lengths: IntArray) -> NDArray[np.int32]:
        return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)

    return Forest(
        column=trees.column.astype(np.uint8),
        split=split,
        first=trees.first.astype(np.uint8),
        last=trees.last.astype(np.uint8),
        node_offsets=offsets(trees.nodes),
        leaf=np.round(trees.leaf / scale).astype(np.int16),
        leaf_offsets=offsets(trees.leaves),
        edges=np.concatenate(edges).astype(np.float32),
        edge_offsets=offsets(np.array([len(column_edges) for column_edges in edges], np.int64)),
        scale=scale,
        baseline=baseline,
    )


def constant(columns: int, value: float) -> Forest:
    """Return a forest without trees that predicts ``value`` for any input."""
    none, no_tree = np.empty(0, np.uint8), np.zeros(1, np.int32)
    return Forest(
        column=none,
        split=none,
        first=none,
        last=none,
        node_offsets=no_tree,
        leaf=np.empty(0, np.int16),
        leaf_offsets=no_tree,
        edges=np.empty(0, np.float32),
        edge_offsets=np.zeros(columns + 1, np.int32),
        scale=1.0,
        baseline=value,
    )


class _TreeColumns:
    """One boosted tree as arrays, in the form of :class:`~hespas.estimators.learned.ensemble.Forest`: inner
    nodes from the root down, leaves from left to right.
    """

    def __init__(self, nodes: NDArray[np.void]) -> None:
        is_leaf: list[bool] = (nodes["is_leaf"] > 0).tolist()
        left: list[int] = nodes["left"].tolist()
        right: list[int] = nodes["right"].tolist()
        inner: list[int] = []
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        leaves: list[int] = []
        # (node, inner node whose left side ends at it)
        waiting: list[tuple[int, int]] = [(0, -1)]
        while waiting:
            node, owner = waiting.pop()
            if owner >= 0:
                last[owner] = len(leaves)
            if is_leaf[node]:
                leaves.append(node)
                continue
            inner.append(node)
            first[node] = len(leaves)
            waiting += [(right[node], node), (left[node], -1)]
        self.column = nodes["feature_idx"][inner].astype(np.int64)
        self.threshold = nodes["num_threshold"][inner].astype(np.float32)
        self.first = np.array([first[node] for node in inner], np.int64)
        self.last = np.array([last[node] for node in inner], np.int64)
        self.leaf = nodes["value"][leaves].astype(np.float64)
