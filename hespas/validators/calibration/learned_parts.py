"""What each learned model is fitted on, and the hyperparameters tried for it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.learned.ensemble import FAMILIES, Forest, features_of
from hespas.estimators.learned.inference import code_columns
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import MissingExtraError, UsageError
from hespas.hardware import Device, device_names, named_device
from hespas.measurements import Measurements
from hespas.operations import KINDS, Labels
from hespas.validators.accuracy.statistics import one_thread
from hespas.validators.calibration.fit_device import is_possible

__all__ = [
    "EXPERTS",
    "FEW",
    "HEADS",
    "PARTS",
    "ROBUST",
    "SMALL",
    "WEIGHTS",
    "Form",
    "Loss",
    "Part",
    "Rows",
    "constant",
    "family_name",
    "grow",
    "library_version",
    "rising",
    "rows_for",
    "rows_of_part",
    "transferable",
]

Loss = Literal["squared_error", "absolute_error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Hyperparameters of boosted trees. ``columns`` is the share of the columns that each split may use."""

    trees: int
    leaves: int
    learning_rate: float
    least_rows: int = 20
    loss: Loss = "squared_error"
    columns: float = 1.0


FEW = Form(trees=200, leaves=15, learning_rate=0.1, least_rows=10)
ROBUST = Form(trees=300, leaves=15, learning_rate=0.08, least_rows=10, loss="absolute_error", columns=0.4)
_COARSE = replace(ROBUST, trees=400, leaves=31, learning_rate=0.06, least_rows=20)
"""No leaf of few rows: what a few of the largest shapes do goes less far beyond them."""
SMALL = Form(trees=150, leaves=31, learning_rate=0.15)
_LARGE = Form(trees=400, leaves=63, learning_rate=0.12)


@dataclass(frozen=True, slots=True)
class Part:
    """One model: the rows of one table of these kinds and schemes (empty: all). ``overhead_ns`` is the part
    of the base that does not grow; ``forms`` are tried on shape groups left out. Rows that share the sizes
    ``layer`` (empty: all sizes) are one group: a layer is met with many token counts, and a new layer with
    none, so that is what must be kept apart.
    """

    name: str
    table: str
    kinds: tuple[str, ...]
    overhead_ns: float
    forms: tuple[Form, ...]
    schemes: tuple[str, ...] = ()
    layer: tuple[str, ...] = ()

    @property
    def support(self) -> tuple[str, ...]:
        """The dimensions of its kinds, each once."""
        return tuple(dict.fromkeys(name for kind in self.kinds for name in KINDS[kind]))


_GEMM = "aiconfigurator_gemm"
_BIG = (SMALL, _LARGE)
_FEW = (FEW, ROBUST)
_ANY = (FEW, ROBUST, SMALL)
WEIGHTS = ("n", "k")
HEADS = ("batch", "heads", "kv_heads", "head_dim")
EXPERTS = ("hidden", "inter", "topk", "experts", "tensor_parallel", "expert_parallel")

# name, table, kinds, overhead [ns], forms
PARTS: tuple[Part, ...] = (
    Part("gemm-bf16", _GEMM, ("matmul",), 3e3, _BIG, schemes=("bf16",), layer=WEIGHTS),
    Part("gemm-fp8", _GEMM, ("matmul",), 12e3, _BIG, schemes=("fp8",), layer=WEIGHTS),
    Part("gemm-fp8-block", _GEMM, ("matmul",), 8e3, _BIG, schemes=("fp8_block",), layer=WEIGHTS),
    Part("gemm-nvfp4", _GEMM, ("matmul",), 8e3, _BIG, schemes=("nvfp4",), layer=WEIGHTS),
    Part(
        "gemm-weight-only", _GEMM, ("matmul",), 5e3, _BIG, schemes=("int8_wo", "int4_wo", "sq"), layer=WEIGHTS
    ),
    Part("mla-products", "aiconfigurator_mla_bmm", ("matmul",), 3e3, _ANY, layer=("batch", "m")),
    Part("gemm-f16", "vidur_compute", ("matmul",), 8e3, _BIG, layer=WEIGHTS),
    Part("gemm-f32", "neusight_perop", ("matmul",), 1e4, _BIG),
    Part("gemm-aiter", "aiter_gemm", ("matmul",), 5e3, _BIG, layer=WEIGHTS),
    Part("gemm-tpu", "tpuv4_matmul", ("matmul",), 1e3, (FEW, _COARSE)),
    Part("conv-f32", "neusight_conv", ("convolution",), 1e4, _BIG, layer=WEIGHTS),
    *(
        Part(
            f"attention-{what}",
            f"aiconfigurator_attention_{what}",
            (f"attention.{what}",),
            overhead_ns,
            _BIG,
            layer=HEADS,
        )
        for what, overhead_ns in (("context", 5e3), ("generation", 6e3), ("encoder", 5e3))
    ),
    Part("moe", "aiconfigurator_moe", ("moe",), 2e4, _BIG, layer=EXPERTS),
    Part("moe-aiter", "aiter_fused_moe", ("moe",), 2e4, _ANY, layer=EXPERTS),
    Part("vector-f32", "neusight_perop", ("vector", "normalization"), 5e3, _BIG),
    Part("vector-f16", "vidur_compute", ("vector", "normalization", "gather"), 5e3, _BIG, layer=("columns",)),
    Part("vector-tpu", "tpuv4_nongemm", ("vector", "normalization", "pooling"), 1e3, _FEW),
    Part("quantize", "aiconfigurator_quantize", ("quantize",), 3e3, _BIG),
)
"""The models that ship with the package."""


def rows_of_part(part: Part, table: Measurements) -> IntArray:
    """Numbers of the rows of a table that a part covers; none where it is another table."""
    if not table.name.startswith(part.table):
        return np.empty(0, np.int64)
    rows = table.ops.kind.where(*part.kinds)
    return np.intersect1d(rows, table.ops.scheme.where(*part.schemes)) if part.schemes else rows


_VERSION = re.compile(r" v?\d[\w.]*")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """``measured`` without rows that have no columns (a device without a file, an unknown peak). ``table`` of
    shape (rows, ``names``); ``sheet_ns`` the data-sheet times; ``ratio`` is log(duration / base), the
    data sheet's before :func:`~hespas.validators.calibration.learned_bases.with_bases`; ``devices`` by name;
    ``codes`` number labels.
    """

    measured: Measurements
    names: tuple[str, ...]
    table: NDArray[np.float32]
    sheet_ns: FloatArray
    ratio: FloatArray
    devices: Mapping[str, Device]
    codes: Mapping[str, Mapping[str, float]]

    def of_devices(self, names: tuple[str, ...]) -> BoolArray:
        """Which rows are of one of the devices."""
        mine = np.zeros(len(self.ratio), np.bool_)
        mine[self.measured.hardware.where(*names)] = True
        return mine

    def take(self, rows: IntArray) -> Rows:
        """Some rows."""
        return replace(
            self,
            measured=self.measured.take(rows),
            table=self.table[rows],
            sheet_ns=self.sheet_ns[rows],
            ratio=self.ratio[rows],
        )

    def columns(self, names: tuple[str, ...]) -> NDArray[np.float32]:
        """Some columns, in that order."""
        return self.table[:, [self.names.index(name) for name in names]]


_TELLING = frozenset(
    {"peak", "peak_per_unit", "ridge", "bandwidth", "units", "cache", "arithmetic", "memory"}
)
"""Columns by which trees tell one device from another. A model for devices it has never seen does without."""
_PRODUCT_SIZES = frozenset(
    {"m", "n", "k", "smallest", "m_over_n", "inputs", "weights", "outputs", "n_over_k", "images"}
)
"""Further ones, of matmuls."""
_RISING = frozenset({"loss", "row_loss"})
"""Columns with which the time of streams can only rise, all others equal: waste of the last wave, where
kernels are simple enough that one exists. Kernels of matmuls change with the shape, so a wave of theirs need
not be there.
"""


def rising(part: Part, names: tuple[str, ...]) -> tuple[int, ...]:
    """The places of the columns with which time can only rise."""
    is_stream = FAMILIES[part.kinds[0]] == "stream"
    return tuple(place for place, name in enumerate(names) if is_stream and name in _RISING)


def family_name(device: Device) -> str:
    """What is left out together: a family of one vendor."""
    return f"{device.vendor} {device.family}"


def transferable(part: Part, names: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that do not tell devices apart."""
    telling = _TELLING | _PRODUCT_SIZES if FAMILIES[part.kinds[0]] == "product" else _TELLING
    return tuple(name for name in names if name not in telling)


def rows_for(part: Part, measured: Measurements, files: Mapping[str, Device] | None = None) -> Rows:
    """The rows of one part with their columns; constant columns and impossible rows are left out. O(rows).

    ``files`` are the devices by their names in the table (None: those that ship with the package).
    """
    known = set(device_names()) if files is None else set(files)
    used = [name for name in measured.hardware.used() if name in known]
    if not used:
        raise UsageError(f"{part.name}: no row is of a known device")
    devices = {name: named_device(name) if files is None else files[name] for name in used}
    measured = measured.take(np.sort(measured.hardware.where(*used)))
    family = FAMILIES[part.kinds[0]]
    names: tuple[str, ...] = ()
    table, base = np.empty((0, 0), np.float32), np.full(len(measured), np.nan)
    for name, device in devices.items():
        mine = measured.hardware.where(name)
        found = features_of(family, measured.ops.take(mine), device, overhead_ns=part.overhead_ns)
        if not names:
            names, table = found.names, np.full((len(measured), len(found.names)), np.nan, np.float32)
        table[mine], base[mine] = found.columns, found.base_ns
        base[mine[~is_possible(measured.take(mine), device)]] = np.nan
    kept = np.flatnonzero(np.isfinite(table).all(axis=1) & np.isfinite(base))
    measured, table = measured.take(kept), table[kept]
    ratio = np.log(measured.duration_ns / base[kept])
    codes = _codes(measured, ratio)
    labels = {"variant": measured.ops.variant, "scheme": measured.ops.scheme, "op": measured.ops.op}
    coded = code_columns(codes, labels)
    table = np.concatenate((table, *(column[:, None] for column in coded.values())), axis=1, dtype=np.float32)
    varies = np.flatnonzero(np.ptp(table, axis=0) > 0).tolist() if len(table) else []
    names = (*names, *coded)
    return Rows(
        measured,
        tuple(names[each] for each in varies),
        np.ascontiguousarray(table[:, varies]),
        base[kept],
        ratio,
        devices,
        codes,
    )


def _codes(measured: Measurements, ratio: FloatArray) -> dict[str, dict[str, float]]:
    """Numbers of labels in the order of their mean ratio; variants that differ only in version are one."""
    ops = measured.ops
    return {
        name: _ordered(labels, ratio, joins_versions=name == "variant")
        for name, labels in (("variant", ops.variant), ("scheme", ops.scheme), ("op", ops.op))
    }


def _ordered(labels: Labels, ratio: FloatArray, *, joins_versions: bool) -> dict[str, float]:
    used = labels.used()
    if not used:
        return {}
    plain = {name: _VERSION.sub("", name) if joins_versions else name for name in used}
    groups = sorted(set(plain.values()))
    group_of = np.array([groups.index(plain.get(name, groups[0])) for name in labels.names])
    group: IntArray = group_of[labels.row]
    sums = np.bincount(group, ratio, len(groups))
    means = sums / np.bincount(group, minlength=len(groups))
    place = np.argsort(np.argsort(means, kind="stable"), kind="stable")
    return {name: float(place[groups.index(plain[name])]) for name in sorted(used)}


_LARGEST_LEAF = 32767
_FEW_ROWS = 20_000


class _Predictor(Protocol):
    nodes: NDArray[np.void]


class _Grown(Protocol):
    _predictors: list[list[_Predictor]]
    _baseline_prediction: NDArray[np.float64]

    def __init__(self, **options: object) -> None: ...

    def fit(self, table: NDArray[np.float32], target: FloatArray) -> _Grown: ...


def library_version() -> str:
    """The name and version of the library that grows trees."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"scikit-learn {version('scikit-learn')}"
    except PackageNotFoundError as error:
        raise MissingExtraError("growing trees", "learned") from error


def grow(
    table: NDArray[np.float32],
    target: FloatArray,
    form: Form,
    *,
    seed: int,
    quantile: float | None = None,
    rising: Sequence[int] = (),
) -> Forest:
    """Boosted trees of ``target`` on ``table``: the form's loss, or pinball loss for a ``quantile``.

    The sum never falls with a column of ``rising``.
    """
    try:
        module = import_module("sklearn.ensemble")
    except ImportError as error:
        raise MissingExtraError("growing trees", "learned") from error
    model = cast("type[_Grown]", module.HistGradientBoostingRegressor)(
        loss=form.loss if quantile is None else "quantile",
        quantile=quantile,
        max_iter=form.trees,
        max_leaf_nodes=form.leaves,
        learning_rate=form.learning_rate,
        min_samples_leaf=form.least_rows,
        l2_regularization=1.0,
        max_features=form.columns,
        monotonic_cst=[int(each in rising) for each in range(table.shape[1])],
        early_stopping=False,
        random_state=seed,
    )
    with one_thread() if len(table) <= _FEW_ROWS else nullcontext():
        grown = model.fit(table, target)
    return _forest(grown, table.shape[1])


def _forest(grown: _Grown, columns: int) -> Forest:
    """The grown trees as columns; splits become numbers of the edges that any tree uses."""
    trees = [_Tree(predictor[0].nodes) for predictor in grown._predictors]  # pyright: ignore[reportPrivateUsage]
    baseline = float(grown._baseline_prediction.reshape(-1)[0])  # pyright: ignore[reportPrivateUsage]
    column = np.concatenate([tree.column for tree in trees])
    threshold = np.concatenate([tree.threshold for tree in trees])
    edges = [np.unique(threshold[column == each]) for each in range(columns)]
    split = np.zeros(len(column), np.uint8)
    for each, mine in enumerate(edges):
        found = column == each
        split[found] = np.searchsorted(mine, threshold[found])
    leaf = np.concatenate([tree.leaf for tree in trees])
    scale = max(float(np.abs(leaf).max()), 1e-30) / _LARGEST_LEAF
    return Forest(
        column=column.astype(np.uint8),
        split=split,
        first=np.concatenate([tree.first for tree in trees]).astype(np.uint8),
        last=np.concatenate([tree.last for tree in trees]).astype(np.uint8),
        node_offsets=_offsets([len(tree.column) for tree in trees]),
        leaf=np.round(leaf / scale).astype(np.int16),
        leaf_offsets=_offsets([len(tree.leaf) for tree in trees]),
        edges=np.concatenate(edges).astype(np.float32),
        edge_offsets=_offsets([len(each) for each in edges]),
        scale=scale,
        baseline=baseline,
    )


def constant(columns: int, value: float) -> Forest:
    """No trees: ``value`` whatever the ``columns`` hold."""
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


def _offsets(lengths: list[int]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


class _Tree:
    """One tree: inner nodes from the root down, leaves from left to right."""

    def __init__(self, nodes: NDArray[np.void]) -> None:
        is_leaf: list[bool] = (nodes["is_leaf"] > 0).tolist()
        left: list[int] = nodes["left"].tolist()
        right: list[int] = nodes["right"].tolist()
        inner: list[int] = []
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        leaves: list[int] = []
        # (node, whose left side ends when this one is reached)
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
