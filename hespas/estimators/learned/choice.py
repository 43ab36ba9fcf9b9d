"""Which stored model speaks for an operation on a device, and which of its variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hespas.estimators.learned.card import Card, Cell
from hespas.estimators.operations import timed_with_events
from hespas.hardware import Device

__all__ = ["Choice", "Wanted", "choose"]

_TWINS: Mapping[str, tuple[str, ...]] = {
    "f16": ("bf16",),
    "bf16": ("f16",),
    "f8E4M3FN": ("a8w8_fp8",),
    "f8E4M3FNUZ": ("a8w8_fp8",),
    "i8": ("a8w8",),
}
"""Schemes of the same width and rate, so that one's times stand for the other's. The ``fp8`` of serving
libraries is none of float8's: it includes the kernels that quantise the activations.
"""
_VECTOR_TWINS: Mapping[str, tuple[str, ...]] = {**_TWINS, "f32": ("f32_full",), "f32_full": ("f32",)}
_UNARY = frozenset(
    {"abs", "neg", "negate", "exp", "log", "sqrt", "rsqrt", "sigmoid", "silu", "copy", "convert", "floor"}
)
_BINARY = frozenset({"sub", "max", "min", "and", "or", "compare", "eq", "ne", "lt", "gt", "le", "ge"})


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of: names of the operation's labels."""

    kind: str
    op: str
    scheme: str
    variant: str


@dataclass(frozen=True, slots=True)
class Choice:
    """``cell`` of the model whose card is at ``path``; ``is_seen`` where the fit had rows of the device."""

    path: Path
    card: Card
    cell: Cell
    is_seen: bool


def choose(
    cards: Sequence[tuple[Path, Card]], wanted: Wanted, device: Device, *, ranked: int = 0
) -> Choice | str:
    """The choice, or why there is none.

    An operation's own number format on this device comes first, then one of the same width and rate, then
    other devices' rows. Of models that are alike in this, the first ``ranked`` speak in their order, before
    all others. Without a variant the one with most rows is taken, but of other devices none that events
    timed: what the host had to do with it is no property of a device.
    """
    found: list[tuple[tuple[int, ...], Path, Card, Cell]] = []
    reason = f"no model of {wanted.kind} in {wanted.scheme or 'an unknown number format'}"
    for place, (path, card) in enumerate(cards):
        for cell in card.cells:
            rank = _rank(cell, wanted)
            if rank is None:
                continue
            if wanted.variant and cell.variant != wanted.variant:
                reason = f"the model of {wanted.kind} has no variant {wanted.variant!r}"
                continue
            unseen = int(device.name not in cell.rows)
            if unseen and not _may_transfer(card, device):
                reason = f"the model of {wanted.kind} knows no device like it"
                continue
            if unseen and not wanted.variant and timed_with_events(cell.variant):
                reason = f"the model of {wanted.kind} holds another host's launches, timed with events"
                continue
            seen = {each.name: each.vendor for each in card.devices}
            foreign = int(device.vendor not in {seen.get(name, "") for name in cell.rows})
            rows = cell.rows.get(device.name, 0) or sum(cell.rows.values())
            found.append(((unseen, foreign, *rank, min(place, ranked), -rows), path, card, cell))
    if not found:
        return reason
    order, path, card, cell = min(found, key=lambda each: (each[0], each[3].variant))
    return Choice(path, card, cell, order[0] == 0)


def _rank(cell: Cell, wanted: Wanted) -> tuple[int, int] | None:
    """How far a cell is from what is wanted (operation, then scheme); None where it is something else."""
    if cell.kind != wanted.kind:
        return None
    of_products = wanted.kind in ("matmul", "convolution") or wanted.kind.startswith("attention")
    twins = (_TWINS if of_products else _VECTOR_TWINS).get(wanted.scheme, ())
    if cell.scheme != wanted.scheme and cell.scheme not in twins:
        return None
    if cell.op == wanted.op or (wanted.kind == "moe" and not wanted.op and cell.op == "balanced"):
        return 0, int(cell.scheme != wanted.scheme)
    stand_in = (cell.op == "relu" and wanted.op in _UNARY) or (cell.op == "add" and wanted.op in _BINARY)
    return (1, int(cell.scheme != wanted.scheme)) if stand_in and wanted.kind == "vector" else None


def _may_transfer(card: Card, device: Device) -> bool:
    """Whether the fit held devices of that kind, of two families at least: then transfer was tested."""
    return card.unseen is not None and any(each.kind == device.kind for each in card.devices)
