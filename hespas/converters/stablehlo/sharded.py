"""Which work of a program has the shapes of the whole job: what is sharded, and not yet partitioned.

Shardings say over which mesh axes data is split; within manual computations (``shard_map``) shapes are those
of one device over the axes that are manual there. Work is global where some axis in use is not manual. There
are two spellings: Shardy's axes by name, and GSPMD's tiles, which have no names: there a manual part counts
by how many devices it is split over (:data:`EVERY_AXIS` for all of them). A partitioned program, which may
still bear its shardings, exchanges data outside of every manual computation.
"""

from __future__ import annotations

import re
from math import prod

from hespas.converters.stablehlo.exchange import Exchange, Message
from hespas.converters.stablehlo.mlir import Operation, defining_op, symbol_of, text_of
from hespas.converters.stablehlo.module import Frame
from hespas.converters.stablehlo.template import Template
from hespas.converters.stablehlo.types import Signature

__all__ = ["EVERY_AXIS", "Shardings", "entered_axes", "global_nodes", "manual_axes"]

EVERY_AXIS = "*"
"""Stands for all axes of a mesh that nobody names; ``*4`` for a part of it of four devices."""

_STATED_IN = (
    "sdy.sharding",
    "mhlo.sharding",
    "mhlo.frontend_attributes",
    "sharding",
    "in_shardings",
    "out_shardings",
    "arg_attrs",
    "res_attrs",
)
_INTO_SHARDS = frozenset({"SPMDFullToShardShape", "xla.sdy.GlobalToLocalShape"})
_DIMENSIONS = re.compile(r"\[((?:\{[^{}\[\]]*\}(?:, ?)?)+)\]")
"""The dimensions of a sharding of Shardy's: ``[{"x", "y"}, {?}]``."""
_NAME = re.compile(r'"([^"]+)"')
_INLINE_AXIS = re.compile(r'"([^"]+)"=(\d{1,9})')
_MANUAL = re.compile(r"manual_axes\{([^{}]*)\}")
_TILES = re.compile(
    r"devices=\[([\d,]{1,200})\](?:<=\S+)?( last_tile_dim_replicate| last_tile_dims=\{[^}]*\})?"
)


def manual_axes(op: Operation) -> frozenset[str]:
    """The axes over which a ``sdy.manual_computation`` has the shapes of one device."""
    return frozenset(_NAME.findall(str(op.attributes.get("manual_axes"))))


def entered_axes(call: Operation) -> frozenset[str]:
    """The manual axes of a function that is called on shards; empty where it is called on whole values."""
    for value in call.operands:
        maker = defining_op(value)
        if maker is None or symbol_of(maker, "call_target_name") not in _INTO_SHARDS:
            continue
        stated = " ".join(text_of(op, "mhlo.frontend_attributes") for op in (call, maker))
        named = _MANUAL.search(stated.replace("\\22", '"').replace('\\"', '"'))
        if named is not None:
            return frozenset(_NAME.findall(named[1]))
        tiles = _tiles(text_of(maker, "mhlo.sharding"))
        return frozenset({EVERY_AXIS if tiles is None else f"{EVERY_AXIS}{tiles[1]}"})
    return frozenset()


def _tiles(sharding: str) -> tuple[int, int] | None:
    """(parts that data is split into, parts that are manual) of a GSPMD sharding, None where nothing is."""
    found = _TILES.search(sharding)
    if found is None:
        return None
    extents = [int(part) for part in found[1].split(",") if part]
    last = found[2] or ""
    kinds = ["replicated"] if "replicate" in last and "{" not in last else []
    if "{" in last:
        kinds = [part.strip() for part in last[last.index("{") + 1 : -1].split(",")]
    split, rest = extents[: len(extents) - len(kinds)], extents[len(extents) - len(kinds) :]
    manual = prod(extent for extent, kind in zip(rest, kinds, strict=False) if kind == "manual")
    return prod(split), manual


class Shardings:
    """What the operations of a module say about how data is split."""

    def __init__(self, frame: Frame) -> None:
        self._extents = {name: extent for mesh in frame.meshes.values() for name, extent in mesh.axes}
        self._seen: set[int] = set()
        self.axes: set[str] = set()
        self.tiles = 1

    def note(self, op: Operation) -> None:
        """Take in what one operation says."""
        attributes = op.attributes
        for name in _STATED_IN:
            attribute = attributes.get(name)
            if attribute is not None and hash(attribute) not in self._seen:
                self._seen.add(hash(attribute))
                self._take(str(attribute).replace("\\22", '"').replace('\\"', '"'))

    def _take(self, text: str) -> None:
        for name, extent in _INLINE_AXIS.findall(text):
            self._extents.setdefault(name, int(extent))
        for dimensions in _DIMENSIONS.findall(text):
            self.axes.update(_NAME.findall(dimensions))
        for found in _TILES.finditer(text):
            tiles = _tiles(found[0])
            if tiles is not None:
                self.tiles = max(self.tiles, tiles[0] * tiles[1])

    def split_within(self, manual: frozenset[str]) -> int:
        """Into how many parts data is still to be split where ``manual`` axes are done; 1: none."""
        if EVERY_AXIS in manual:
            return 1
        named = prod(self._extents.get(name, 2) for name in self.axes - manual)
        if named > 1 or self.axes:
            return named
        done = prod(int(name[1:]) for name in manual if name.startswith(EVERY_AXIS))
        return self.tiles // max(done, 1)


def global_nodes(
    template: Template, signatures: list[Signature], exchanges: list[Exchange], shardings: Shardings
) -> tuple[list[int], int]:
    """The nodes whose shapes are those of the whole job, and into how many parts that work splits at most;
    none in a program that exchanges data outside of manual computations. O(nodes + regions).
    """
    within: list[frozenset[str]] = []
    for row in template.regions:  # parents first
        within.append(row.manual | (within[row.parent] if row.parent >= 0 else frozenset[str]()))
    for link in template.links:
        exchange = exchanges[link.exchange]
        region = template.region[link.node]
        is_host = isinstance(exchange, Message) and exchange.is_host
        if not is_host and not (region >= 0 and within[region]):
            return [], 1
    parts = {axes: shardings.split_within(axes) for axes in {*within, frozenset[str]()}}
    if max(parts.values()) < 2:
        return [], 1
    costly = [_costs(row) for row in signatures]
    found = [
        node
        for node, (signature, region) in enumerate(zip(template.signature, template.region, strict=True))
        if costly[signature] and parts[within[region] if region >= 0 else frozenset()] > 1
    ]
    return found, max(parts.values())


def _costs(row: Signature) -> bool:
    """Whether an operation takes time and has something to split: scalars are everybody's."""
    cost = row.cost
    return not cost.is_known or cost.flops > 1 or cost.bytes_read + cost.bytes_written > _SCALARS


_SCALARS = 64.0
"""Bytes that an operation on scalars moves at most."""
