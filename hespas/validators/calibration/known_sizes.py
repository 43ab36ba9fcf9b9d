"""Candidates of operation sizes to measure, as rows of a user's table (:mod:`hespas.measurements.tidy`).

Sizes are drawn from the octaves (powers of two) that the package's learned models were fitted to, and a few
from one octave beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hespas.estimators.forms import machine_of
from hespas.estimators.learned.extrapolation import octaves_beyond
from hespas.estimators.learned.serialization import LearnedModel, cards_in, load_model, shipped_folder
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device
from hespas.measurements import Columns
from hespas.measurements.tidy import tidy_operations
from hespas.operations import KINDS, Operations, find_scheme

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LABELS", "Candidates", "KnownSizes", "candidates_of", "known_sizes"]

LABELS = ("hardware", "kind", "op", "dtype")
"""Columns of a table that are not sizes."""

_USUAL = ("matmul",)
_FORMATS = ("bf16", "f16", "f32_full")
"""Number formats to choose from without a request: the one with the highest rate; of equal ones the first."""
_OCTAVES_BEYOND = 1
_SHARE_BEYOND = 0.1
_OF_ONE_CLASS = 2000
"""Candidates of one kind and number format; the time of the choice grows with their square."""
_SHARE_OF_MEMORY = 0.5
_COUNTED = frozenset(
    {
        *("batch", "heads", "kv_heads", "head_dim", "kernel"),
        *("topk", "experts", "tensor_parallel", "expert_parallel", "matrices"),
    }
)
"""Dimensions that are powers of two in nearly all programs; other dimensions also have odd sizes."""
_DIVISORS = (("heads", "kv_heads"), ("experts", "expert_parallel"), ("inter", "tensor_parallel"))
"""Dimensions that must be divisible by another one."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KnownSizes:
    """Operations of one kind and number format (``scheme``) to which learned ``models`` were fitted.

    ``stand_in`` is the number format of the rows in the fits: ``scheme`` itself, or a format of the same
    width. ``ops`` are the names of the fitted operations.
    """

    kind: str
    scheme: str
    stand_in: str
    models: tuple[LearnedModel, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Candidates:
    """Shapes that could be measured next. ``frame`` is a table with the columns hardware, kind, op, dtype and
    sizes; the other field has the same shapes as operations.
    """

    frame: pd.DataFrame
    ops: Operations


def known_sizes(device: Device, kinds: Sequence[str], dtypes: Sequence[str]) -> tuple[KnownSizes, ...]:
    """Return the sizes to which the learned models were fitted, for ``kinds`` (empty: matmul) and ``dtypes``.

    If ``dtypes`` is empty, one of bf16, f16 and f32_full is used: the covered format with the highest rate on
    the device. If no model covers one of these three, any covered format with the highest rate is used.
    Raises ``UsageError`` if no model covers an operation, or the device has no rate for it.
    """
    model_kinds = kinds or _USUAL
    shipped = cards_in(shipped_folder())
    all_kinds = sorted({cell.kind for _, card in shipped for cell in card.cells})
    usable = [(path, card) for path, card in shipped if device.kind in {other.kind for other in card.devices}]
    for kind in model_kinds:
        if kind not in all_kinds:
            raise UsageError(
                f"no learned model covers sizes of kind {kind!r}",
                hint=f"choose one of {', '.join(all_kinds)}",
            )
        if not any(cell.kind == kind for _, card in usable for cell in card.cells):
            others = sorted({other.kind for _, card in shipped for other in card.devices})
            raise UsageError(
                f"no learned model of {kind} covers a {device.kind} such as {device.name}",
                hint=f"measure sizes from the least to the largest used; models cover {', '.join(others)}",
            )
    models = [load_model(path) for path, _ in usable]
    sizes: dict[tuple[str, str], KnownSizes] = {}
    for kind in kinds or _USUAL:
        schemes: list[str] = []
        for name in dtypes:
            scheme = find_scheme(name)
            if scheme is None:
                raise UsageError(
                    f"no number format {name!r}", hint="choose one such as bf16, f16, f32_full or fp8"
                )
            schemes.append(scheme.name)
        covered = list(
            dict.fromkeys(cell.scheme for model in models for cell in model.card.cells if cell.kind == kind)
        )
        if not schemes:
            usual = [name for name in _FORMATS if any(_has_same_width(name, other) for other in covered)]
            rates = {name: np.nan_to_num(_flops_per_ns(device, kind, name)) for name in usual or covered}
            schemes = [max(rates, key=rates.__getitem__)]
        for scheme_name in schemes:
            if not _flops_per_ns(device, kind, scheme_name) > 0:
                raise UsageError(
                    f"the file of {device.name} has no rate of {kind} in {scheme_name}",
                    hint="choose another `dtype`, or give the peak in a hardware file",
                )
            cells = [(model, cell) for model in models for cell in model.card.cells if cell.kind == kind]
            covered_sizes = sorted({cell.scheme for _, cell in cells})
            alike = (
                name
                for name in (scheme_name, *covered_sizes)
                if name in covered_sizes and _has_same_width(name, scheme_name)
            )
            stand_in = next(alike, "")
            if not stand_in:
                raise UsageError(
                    f"no learned model of {kind} covers {scheme_name} on a {device.kind}",
                    hint=f"choose one of {', '.join(covered_sizes)}",
                )
            of_format = [(model, cell) for model, cell in cells if cell.scheme == stand_in]
            sizes[kind, scheme_name] = KnownSizes(
                kind=kind,
                scheme=scheme_name,
                stand_in=stand_in,
                models=tuple({model.card.name: model for model, _ in of_format}.values()),
                ops=tuple(
                    sorted({cell.op for _, cell in of_format if kind != "moe" or cell.op == "balanced"})
                ),
            )
    return tuple(sizes.values())


def _flops_per_ns(device: Device, kind: str, scheme: str) -> float:
    """Return the peak rate of the device for a kind and number format [FLOP/ns]; NaN if it has none."""
    return machine_of(device, kind, scheme).flops_per_ns


def _has_same_width(name: str, other: str) -> bool:
    first, second = find_scheme(name), find_scheme(other)
    if first is None or second is None:
        return False
    return (first.activation_bits, first.weight_bits) == (second.activation_bits, second.weight_bits)


def candidates_of(known: KnownSizes, device: Device, generator: np.random.Generator) -> Candidates:
    """Return distinct operations that fit into the device's memory, with about equal numbers from each octave
    of the sizes in the fits.
    """
    import pandas as pd

    fitted = [np.unique(model.octaves, axis=0).astype(np.float64) for model in known.models]
    total = sum(map(len, fitted))
    frames: list[pd.DataFrame] = []
    most = device.main_memory.capacity_bytes
    most_bytes = _SHARE_OF_MEMORY * (most if most > 0 else np.inf)
    for model, octaves in zip(known.models, fitted, strict=True):
        count = -(-_OF_ONE_CLASS * len(octaves) // total)
        kind = known.kind
        sizes = _drawn_sizes(model, octaves, count, generator)
        if kind == "convolution":
            kernel, size = sizes["kernel"], np.round(sizes["spatial"])
            columns = {
                "images": np.maximum(np.round(sizes["m"] / size**2), 1.0),
                "in_channels": np.maximum(np.round(sizes["k"] / kernel**2), 1.0),
                "out_channels": sizes["n"],
                "kernel": kernel,
                "in_size": size,
                "out_size": size,
            }
        else:
            derived = {"attention.context": ("kv_len", "pairs")}.get(kind, ())
            columns = {name: sizes[name] for name in KINDS[kind] if name not in derived}
            if "kv_heads" in columns:
                columns["kv_heads"] = np.minimum(columns["kv_heads"], columns["heads"])
        labels = zip(LABELS, (device.name, known.kind, "", known.scheme), strict=True)
        frame = pd.DataFrame({**{name: [text] * count for name, text in labels}, **columns})
        frame["op"] = np.array(known.ops, np.object_)[generator.integers(len(known.ops), size=count)]
        ops = _operations_of(frame)
        is_possible = np.isfinite(ops.flops) & (ops.bytes_moved <= most_bytes)
        for name, divisor in _DIVISORS:
            divisors = np.maximum(np.nan_to_num(ops.dim(divisor, 1.0), nan=1.0), 1.0)
            is_possible &= np.nan_to_num(ops.dim(name, 1.0)) % divisors == 0
        is_possible &= ~(ops.dim("topk") > ops.dim("experts"))
        is_possible &= octaves_beyond(model.card.reach, ops) <= _OCTAVES_BEYOND
        frames.append(frame[is_possible])
    together = pd.concat(frames, ignore_index=True)
    first, _ = _operations_of(together).distinct_rows()
    frame = together.iloc[np.sort(first)].reset_index(drop=True)
    return Candidates(frame=frame, ops=_operations_of(frame))


def _operations_of(frame: pd.DataFrame) -> Operations:
    """Return the rows of a frame as operations, converted as by the table reader."""
    return tidy_operations(Columns(Path("candidates"), frame))


def _drawn_sizes(
    model: LearnedModel, fitted: FloatArray, count: int, generator: np.random.Generator
) -> dict[str, FloatArray]:
    """Draw ``count`` random rows of sizes near the ``fitted`` octaves, which have shape ``(octaves,
    dimensions)``. Sizes are within half an octave of a fitted octave.

    A share of the rows is an octave beyond in one dimension. Three quarters of the sizes are multiples of 64
    (below 128: of 8, below 16: of 1), an eighth are powers of two, an eighth are any whole number.
    """
    rounds = -(-count // len(fitted))
    octaves = np.concatenate([generator.permutation(fitted) for _ in range(rounds)])[:count]
    names = model.card.support
    beyond = generator.integers(len(names), size=count)
    beyond[generator.random(count) > _SHARE_BEYOND] = -1
    sizes: dict[str, FloatArray] = {}
    for number, name in enumerate(names):
        low, high = model.card.reach[name]
        logs: FloatArray = octaves[:, number]
        if name in _COUNTED:
            sizes[name] = np.clip(np.exp2(logs), low, high)
            continue
        logs = logs + generator.uniform(-0.5, 0.5, count) + (beyond == number)
        choice = generator.random(count)
        drawn: FloatArray = np.exp2(logs)
        grid = np.select([drawn >= 128, drawn >= 16], [64.0, 8.0], 1.0)
        snapped: FloatArray = np.select(
            [choice < 1 / 8, choice < 1 / 4],
            [np.rint(drawn), np.exp2(np.rint(logs))],
            np.rint(drawn / grid) * grid,
        )
        limit = np.where(beyond == number, 2 * high, high)
        sizes[name] = np.clip(np.maximum(snapped, 1.0), low, limit)
    return sizes
