"""Sizes worth measuring: drawn from the octaves that the learned models of the package have seen, and a few
one octave beyond, as rows of a table of one's own (:mod:`hespas.measurements.tidy`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hespas.estimators.forms import machine_of
from hespas.estimators.learned.inference import octaves_beyond
from hespas.estimators.learned.serialization import Cell, LearnedModel, cards_in, load_model, shipped_folder
from hespas.graph.columns import BoolArray, FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device
from hespas.measurements import Columns
from hespas.measurements.tidy import tidy_operations
from hespas.operations import KINDS, Operations, find_scheme

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LABELS", "Candidates", "KnownSizes", "candidates_of", "known_sizes"]

LABELS = ("hardware", "kind", "op", "dtype")
"""The columns of a table that are no sizes."""

_USUAL = ("matmul",)
_FORMATS = ("bf16", "f16", "f32_full")
"""Of these the one in which the device is fastest is asked for where nobody says; of equal ones the first."""
_OCTAVES_BEYOND = 1
_SHARE_BEYOND = 0.1
_OF_ONE_CLASS = 2000
"""Candidates of one kind and number format: choosing among them takes time in proportion to their square."""
_SHARE_OF_MEMORY = 0.5
_COUNTED = frozenset(
    {
        *("batch", "heads", "kv_heads", "head_dim", "kernel"),
        *("topk", "experts", "tensor_parallel", "expert_parallel", "matrices"),
    }
)
"""Dimensions that are powers of two in nearly all programs; of all others a part is drawn off any grid."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KnownSizes:
    """What ``models`` know of one kind and number format. ``stand_in`` is the format they were fitted on, of
    the same width as ``scheme`` where they have none of that; ``ops`` are the operations they saw.
    """

    kind: str
    scheme: str
    stand_in: str
    models: tuple[LearnedModel, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Candidates:
    """Rows of a table (``frame``: hardware, kind, op, dtype, sizes), and the operations they are read as."""

    frame: pd.DataFrame
    ops: Operations


# What is covered.


def known_sizes(device: Device, kinds: Sequence[str], dtypes: Sequence[str]) -> tuple[KnownSizes, ...]:
    """What models know of ``kinds`` (empty: matmul) in ``dtypes`` (empty: of bf16, f16 and f32_full the one
    in which the device is fastest). Raises ``UsageError`` for what no model covers, or the device has no rate
    for.
    """
    models = _models_for(device, kinds or _USUAL)
    found: dict[tuple[str, str], KnownSizes] = {}
    for kind in kinds or _USUAL:
        names = [_scheme(name) for name in dtypes] or [_usual_format(kind, models, device)]
        for name in names:
            found[kind, name] = _known(kind, name, models, device)
    return tuple(found.values())


def _models_for(device: Device, kinds: Sequence[str]) -> Sequence[LearnedModel]:
    """Models that know devices like this one. Raises ``UsageError`` for a kind that none of them knows."""
    shipped = cards_in(shipped_folder())
    every = sorted({cell.kind for _, card in shipped for cell in card.cells})
    mine = [(path, card) for path, card in shipped if any(each.kind == device.kind for each in card.devices)]
    for kind in kinds:
        if kind not in every:
            raise UsageError(
                f"no learned model knows sizes of kind {kind!r}", hint=f"one of {', '.join(every)}"
            )
        if not any(cell.kind == kind for _, card in mine for cell in card.cells):
            others = sorted({each.kind for _, card in shipped for each in card.devices})
            raise UsageError(
                f"no learned model of {kind} knows a {device.kind}, which {device.name} is",
                hint=f"measure sizes from the least to the largest used; models know {', '.join(others)}",
            )
    return [load_model(path) for path, _ in mine]


def _scheme(name: str) -> str:
    found = find_scheme(name)
    if found is None:
        raise UsageError(f"no number format {name!r}", hint="such as bf16, f16, f32_full, fp8")
    return found.name


def _cells(kind: str, models: Sequence[LearnedModel]) -> Iterator[tuple[LearnedModel, Cell]]:
    return ((model, cell) for model in models for cell in model.card.cells if cell.kind == kind)


def _usual_format(kind: str, models: Sequence[LearnedModel], device: Device) -> str:
    """The number format of a kind where nobody says."""
    covered = list(dict.fromkeys(cell.scheme for _, cell in _cells(kind, models)))
    usual = [name for name in _FORMATS if any(_same_width(name, other) for other in covered)]
    return max(usual or covered, key=lambda name: np.nan_to_num(_rate(device, kind, name)))


def _rate(device: Device, kind: str, scheme: str) -> float:
    """FLOP/ns; NaN where the device states none."""
    return machine_of(device, kind, scheme).flops_per_ns


def _known(kind: str, scheme: str, models: Sequence[LearnedModel], device: Device) -> KnownSizes:
    """Models of the format itself, else of one of the same width."""
    if not _rate(device, kind, scheme) > 0:
        raise UsageError(
            f"the file of {device.name} states no rate of {kind} in {scheme}",
            hint="choose another `dtype`, or state the peak in a hardware file",
        )
    covered = sorted({cell.scheme for _, cell in _cells(kind, models)})
    stand_in = next(
        (name for name in (scheme, *covered) if name in covered and _same_width(name, scheme)), ""
    )
    if not stand_in:
        raise UsageError(
            f"no learned model of {kind} knows {scheme} on a {device.kind}",
            hint=f"one of {', '.join(covered)}",
        )
    mine = [(model, cell) for model, cell in _cells(kind, models) if cell.scheme == stand_in]
    return KnownSizes(
        kind=kind,
        scheme=scheme,
        stand_in=stand_in,
        models=tuple({model.card.name: model for model, _ in mine}.values()),
        ops=tuple(sorted({cell.op for _, cell in mine if kind != "moe" or cell.op == "balanced"})),
    )


def _same_width(one: str, other: str) -> bool:
    first, second = find_scheme(one), find_scheme(other)
    if first is None or second is None:
        return False
    bits = [(each.activation_bits, each.weight_bits) for each in (first, second)]
    return bits[0] == bits[1]


# Sizes drawn, and snapped to what programs have.


def candidates_of(known: KnownSizes, device: Device, generator: np.random.Generator) -> Candidates:
    """Distinct operations that the device can hold: from each octave that a fit has seen about as many."""
    import pandas as pd

    seen = [np.unique(model.octaves, axis=0).astype(np.float64) for model in known.models]
    octaves = sum(map(len, seen))
    frames: list[pd.DataFrame] = []
    for model, each in zip(known.models, seen, strict=True):
        count = -(-_OF_ONE_CLASS * len(each) // octaves)
        columns = _columns_of(known.kind, _sizes(model, each, count, generator))
        labels = zip(LABELS, (device.name, known.kind, "", known.scheme), strict=True)
        frame = pd.DataFrame({**{name: [text] * count for name, text in labels}, **columns})
        frame["op"] = np.array(known.ops, np.object_)[generator.integers(len(known.ops), size=count)]
        ops = _read(frame)
        frames.append(
            frame[_is_real(ops, device) & (octaves_beyond(model.card.reach, ops) <= _OCTAVES_BEYOND)]
        )
    together = pd.concat(frames, ignore_index=True)
    first, _ = _read(together).distinct_rows()
    frame = together.iloc[np.sort(first)].reset_index(drop=True)
    return Candidates(frame=frame, ops=_read(frame))


def _read(frame: pd.DataFrame) -> Operations:
    """The rows as the table will be read."""
    return tidy_operations(Columns(Path("candidates"), frame))


def _sizes(
    model: LearnedModel, seen: FloatArray, count: int, generator: np.random.Generator
) -> dict[str, FloatArray]:
    """``count`` rows of sizes within half an octave of those ``seen`` (octaves, dimensions); a share of them
    an octave beyond in one.
    """
    rounds = -(-count // len(seen))
    octaves = np.concatenate([generator.permutation(seen) for _ in range(rounds)])[:count]
    names = model.card.support
    beyond = generator.integers(len(names), size=count)
    beyond[generator.random(count) > _SHARE_BEYOND] = -1
    found: dict[str, FloatArray] = {}
    for place, name in enumerate(names):
        low, high = model.card.reach[name]
        logs = octaves[:, place]
        if name in _COUNTED:
            found[name] = np.clip(np.exp2(logs), low, high)
            continue
        logs = logs + generator.uniform(-0.5, 0.5, count) + (beyond == place)
        top = np.where(beyond == place, 2 * high, high)
        found[name] = np.clip(_snapped(logs, generator.random(count)), low, top)
    return found


def _snapped(logs: FloatArray, how: FloatArray) -> FloatArray:
    """Whole sizes near 2^``logs``: three quarters multiples of 64 (below 128: of 8, below 16: any), an eighth
    powers of two, an eighth just as drawn.
    """
    sizes = np.exp2(logs)
    grid = np.select([sizes >= 128, sizes >= 16], [64.0, 8.0], 1.0)
    plain = np.round(sizes / grid) * grid
    drawn, power = np.round(sizes), np.exp2(np.round(logs))
    found: FloatArray = np.maximum(np.select([how < 1 / 8, how < 1 / 4], [drawn, power], plain), 1.0)
    return found


def _columns_of(kind: str, sizes: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Columns of a table of one's own, of a kind's dimensions."""
    if kind == "convolution":
        kernel, size = sizes["kernel"], np.round(sizes["spatial"])
        return {
            "images": np.maximum(np.round(sizes["m"] / size**2), 1.0),
            "in_channels": np.maximum(np.round(sizes["k"] / kernel**2), 1.0),
            "out_channels": sizes["n"],
            "kernel": kernel,
            "in_size": size,
            "out_size": size,
        }
    derived = {"attention.context": ("kv_len", "pairs")}.get(kind, ())
    columns = {name: sizes[name] for name in KINDS[kind] if name not in derived}
    if "kv_heads" in columns:
        columns["kv_heads"] = np.minimum(columns["kv_heads"], columns["heads"])
    return columns


_DIVIDED = (("heads", "kv_heads"), ("experts", "expert_parallel"), ("inter", "tensor_parallel"))


def _is_real(ops: Operations, device: Device) -> BoolArray:
    """Which operations can be: what divides another divides it, and operands lie in half of the memory."""
    most = device.main_memory.capacity_bytes
    real = np.isfinite(ops.flops) & (ops.bytes_moved <= _SHARE_OF_MEMORY * (most if most > 0 else np.inf))
    for whole, part in _DIVIDED:
        left = np.nan_to_num(ops.dim(whole, 1.0)) % np.maximum(
            np.nan_to_num(ops.dim(part, 1.0), nan=1.0), 1.0
        )
        real &= left == 0
    return real & ~(ops.dim("topk") > ops.dim("experts"))
