"""Selection of the learned model, and of the measured variant in it, that predicts an operation on a
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hespas.estimators.learned.bases import ReferenceDevices
from hespas.estimators.learned.extrapolation import references_of
from hespas.estimators.learned.serialization import Card, Cell
from hespas.estimators.rates import rate_flops_per_s
from hespas.hardware import Device
from hespas.operations import MATRIX_KINDS, timed_with_events

__all__ = ["ModelSelection", "OperationLabels", "select_model"]

_SAME_KERNELS = 2.0
"""Distance up to which a device runs the same kernels as its nearest reference device, with their jumps."""

_SAME_RATE: Mapping[str, tuple[str, ...]] = {
    "f16": ("bf16",),
    "bf16": ("f16",),
    "f8E4M3FN": ("a8w8_fp8",),
    "f8E4M3FNUZ": ("a8w8_fp8",),
    "i8": ("a8w8",),
}
"""Schemes of the same width and rate, which take the same time. The ``fp8`` of serving libraries is not
listed with float8: it includes the kernels that quantise the activations.
"""
_SAME_VECTOR_RATE: Mapping[str, tuple[str, ...]] = {**_SAME_RATE, "f32": ("f32_full",), "f32_full": ("f32",)}
_UNARY = frozenset(
    {"abs", "neg", "negate", "exp", "log", "sqrt", "rsqrt", "sigmoid", "silu", "copy", "convert", "floor"}
)
_BINARY = frozenset({"sub", "max", "min", "and", "or", "compare", "eq", "ne", "lt", "gt", "le", "ge"})


@dataclass(frozen=True, slots=True)
class OperationLabels:
    """Labels that select a learned model: kind, operation, number format and variant of an operation."""

    kind: str
    op: str
    scheme: str
    variant: str


@dataclass(frozen=True, slots=True)
class ModelSelection:
    """Model selected for a class of operations (its card is at ``path``), and its ``cell``: the group of
    fitted operations from which it predicts.

    ``references`` are the devices from which a device without rows in the fit is predicted; otherwise None.
    ``as_timed`` is True if the operation names the variant. Launches that are part of the measured times of
    that variant are then included in the prediction.
    """

    path: Path
    card: Card
    cell: Cell
    references: ReferenceDevices | None
    as_timed: bool

    @property
    def is_fitted_device(self) -> bool:
        """Return True if the fit has measurements of the device."""
        return self.references is None

    @property
    def has_known_kernels(self) -> bool:
        """Return True if the device runs the kernels of a measured device: itself, or one that is near."""
        return self.references is None or self.references.nearest < _SAME_KERNELS


def select_model(
    cards: Sequence[tuple[Path, Card]], labels: OperationLabels, device: Device, *, ranked: int = 0
) -> ModelSelection | str:
    """Return the model that predicts a class of operations, or the reason why none covers it.

    A cell is a group of operations with equal labels that a model was fitted on. Cells are preferred in this
    order: in the operation's own number format on this device, in a format of the same width and rate, on
    other devices. A cell of another format is not used on a device that is slower in that format. Among other
    devices, cells without the launch of another host come before cells timed with events, and the nearest
    reference devices come first. Among equal cells the first ``ranked`` cards come first, in their order. If
    the operation has no variant, the cell with the most rows is used.
    """
    candidates: list[tuple[tuple[int, ...], ModelSelection]] = []
    reason = f"no model of {labels.kind} in {labels.scheme or 'an unknown number format'}"
    for position, (path, card) in enumerate(cards):
        for cell in card.cells:
            rank = _label_distance(cell, labels)
            if rank is None:
                continue
            if labels.variant and cell.variant != labels.variant:
                reason = f"the model of {labels.kind} has no variant {labels.variant!r}"
                continue
            is_fitted = device.name in cell.rows
            references = None
            if not is_fitted:
                is_matrix = labels.kind in MATRIX_KINDS
                rates = [
                    rate_flops_per_s(device, scheme, matrix=is_matrix)
                    for scheme in (cell.scheme, labels.scheme)
                ]
                if rates[0] < rates[1]:  # the device is slower in the other format, or has no rate for it
                    continue
                references = references_of(card, cell, device)
            if references is None and not is_fitted:
                reason = f"the model of {labels.kind} was not fitted on a {device.kind}"
                continue
            transfer = (0, 0)
            if references is not None:
                transfer = (int(timed_with_events(cell.variant)), round(references.nearest))
            rows = cell.rows.get(device.name, 0) or sum(cell.rows.values())
            order = (int(not is_fitted), *transfer, *rank, min(position, ranked), -rows)
            selection = ModelSelection(path, card, cell, references, bool(labels.variant))
            candidates.append((order, selection))
    if not candidates:
        return reason
    return min(candidates, key=lambda candidate: (candidate[0], candidate[1].cell.variant))[1]


def _label_distance(cell: Cell, labels: OperationLabels) -> tuple[int, int] | None:
    """Return the differences between the fitted group ``cell`` and an operation, as a pair: 1 if the
    operation differs (else 0), and 1 if the number format differs. None if the cell cannot be used for the
    operation.
    """
    if cell.kind != labels.kind:
        return None
    of_products = labels.kind in ("matmul", "convolution") or labels.kind.startswith("attention")
    same_rate = (_SAME_RATE if of_products else _SAME_VECTOR_RATE).get(labels.scheme, ())
    if cell.scheme != labels.scheme and cell.scheme not in same_rate:
        return None
    if cell.op == labels.op or (labels.kind == "moe" and not labels.op and cell.op == "balanced"):
        return 0, int(cell.scheme != labels.scheme)
    similar = (cell.op == "relu" and labels.op in _UNARY) or (cell.op == "add" and labels.op in _BINARY)
    return (1, int(cell.scheme != labels.scheme)) if similar and labels.kind == "vector" else None
