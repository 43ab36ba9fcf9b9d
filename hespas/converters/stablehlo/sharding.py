"""Shardings of a program, and the operations whose shapes cover the whole job instead of one device.

A sharding states over which mesh axes data is split. Inside a manual computation (``shard_map``) shapes are
per device along its manual axes. An operation has global shapes if the program splits data over an axis that
is not manual there. Shardings have two notations: Shardy names axes, and GSPMD states tiles without names.
The manual part of a GSPMD sharding is identified by its number of devices (:data:`EVERY_AXIS` for all). A
partitioned program may still contain shardings; it is recognized by communication outside of manual
computations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from hespas.converters.stablehlo.communication import Communication, DeviceMesh, ProgramMessage
from hespas.converters.stablehlo.mlir import MlirOperation, defining_op, text_of
from hespas.converters.stablehlo.node_rows import StablehloSignature
from hespas.converters.stablehlo.template import FunctionTemplate

__all__ = ["EVERY_AXIS", "Shardings", "entered_axes", "global_nodes", "manual_axes"]

EVERY_AXIS = "*"
"""Placeholder for all axes of an unnamed mesh; ``*4`` is a part of four devices."""

_SHARDING_ATTRIBUTES = (
    "sdy.sharding",
    "mhlo.sharding",
    "mhlo.frontend_attributes",
    "sharding",
    "in_shardings",
    "out_shardings",
    "arg_attrs",
    "res_attrs",
)

_SHARDING_CALLS = frozenset({"SPMDFullToShardShape", "xla.sdy.GlobalToLocalShape"})

_DIMENSIONS = re.compile(r"(?:@[^,<>\[\]{}]+|mesh<[^<>]*>), ?\[((?:\{[^{}\[\]]*\}(?:p\d+)?(?:, ?)?)+)\]")
"""Dimensions of a Shardy sharding after its mesh: ``@mesh, [{"x", "y"}, {?}]``. Attribute lists of arguments
and results hold other names: ``[{jax.result_info = "result"}]``.
"""

_NAME = re.compile(r'"([^"]+)"')

_INLINE_AXIS = re.compile(r'"([^"]+)"=(\d{1,9})')

_MANUAL = re.compile(r"manual_axes\{([^{}]*)\}")

_TILES = re.compile(
    r"devices=\[([\d,]{1,200})\](?:<=\S+)?( last_tile_dim_replicate| last_tile_dims=\{[^}]*\})?"
)


def manual_axes(op: MlirOperation) -> frozenset[str]:
    """Return the mesh axes of a ``sdy.manual_computation`` along which its shapes are per device (manual
    axes).
    """
    return frozenset(_NAME.findall(str(op.attributes.get("manual_axes"))))


def entered_axes(call: MlirOperation) -> frozenset[str]:
    """Return the manual axes of a function that is called on shards; empty for a call on whole arrays."""
    for value in call.operands:
        maker = defining_op(value)
        if maker is None or text_of(maker, "call_target_name") not in _SHARDING_CALLS:
            continue
        frontend = " ".join(text_of(op, "mhlo.frontend_attributes") for op in (call, maker))
        manual = _MANUAL.search(frontend.replace("\\22", '"').replace('\\"', '"'))
        if manual is not None:
            return frozenset(_NAME.findall(manual[1]))
        tiles = _tiles(text_of(maker, "mhlo.sharding"))
        return frozenset({EVERY_AXIS if tiles is None else f"{EVERY_AXIS}{tiles[1]}"})
    return frozenset()


def _tiles(sharding: str) -> tuple[int, int] | None:
    """Return the numbers of data shards and of manual shards of a GSPMD sharding; None for a sharding without
    tiles.
    """
    tiles = _TILES.search(sharding)
    if tiles is None:
        return None
    extents = [int(part) for part in tiles[1].split(",") if part]
    last = tiles[2] or ""
    kinds = ["replicated"] if "replicate" in last and "{" not in last else []
    if "{" in last:
        kinds = [part.strip() for part in last[last.index("{") + 1 : -1].split(",")]
    split, rest = extents[: len(extents) - len(kinds)], extents[len(extents) - len(kinds) :]
    manual = prod(extent for extent, kind in zip(rest, kinds, strict=False) if kind == "manual")
    return prod(split), manual


class Shardings:
    """Shardings that occur in a module: the mesh axes along which data are split, and the largest number of
    tiles. From these it is decided if the program is partitioned.
    """

    def __init__(self, meshes: Mapping[str, DeviceMesh]) -> None:
        self._extents: dict[str, int] = {
            name: extent for mesh, _ in meshes.values() for name, extent in mesh.axes.items()
        }
        self._seen: set[int] = set()
        self.axes: set[str] = set()
        self.tiles = 1

    def note(self, op: MlirOperation) -> None:
        """Record the shardings that one operation states."""
        attributes = op.attributes
        for name in _SHARDING_ATTRIBUTES:
            attribute = attributes.get(name)
            if attribute is not None and hash(attribute) not in self._seen:
                self._seen.add(hash(attribute))
                text = str(attribute).replace("\\22", '"').replace('\\"', '"')
                for axis, extent in _INLINE_AXIS.findall(text):
                    self._extents.setdefault(axis, int(extent))
                for dimensions in _DIMENSIONS.findall(text):
                    self.axes.update(_NAME.findall(dimensions))
                for tiled in _TILES.finditer(text):
                    tiles = _tiles(tiled[0])
                    if tiles is not None:
                        self.tiles = max(self.tiles, tiles[0] * tiles[1])

    def split_within(self, manual: frozenset[str]) -> int:
        """Return the number of shards into which the partitioner still splits the data inside a manual
        computation, whose shapes are already per device along the axes ``manual``. It is 1 if the data is not
        split further.
        """
        if EVERY_AXIS in manual:
            return 1
        num_parts = prod(self._extents.get(name, 2) for name in self.axes - manual)
        if num_parts > 1 or self.axes:
            return num_parts
        num_manual = prod(int(name[1:]) for name in manual if name.startswith(EVERY_AXIS))
        return self.tiles // max(num_manual, 1)


def global_nodes(
    template: FunctionTemplate,
    signatures: list[StablehloSignature],
    communications: list[Communication],
    shardings: Shardings,
) -> tuple[list[int], int]:
    """Return the nodes whose shapes are those of the whole job, and the largest number of shards into which
    the partitioner would split them.

    A program that communicates outside of manual computations is partitioned already, and has no such nodes.
    O(nodes + regions).
    """
    within: list[frozenset[str]] = []
    for entry in template.regions:  # parents first
        within.append(entry.manual | (within[entry.parent] if entry.parent >= 0 else frozenset[str]()))
    for node, row in template.links:
        communication, region = communications[row], template.region[node]
        is_host = isinstance(communication, ProgramMessage) and communication.is_host
        if not is_host and not (region >= 0 and within[region]):
            return [], 1
    parts = {axes: shardings.split_within(axes) for axes in {*within, frozenset[str]()}}
    if max(parts.values()) < 2:
        return [], 1
    # Operations on scalars are excluded: they run on every device in any case.
    costs = [row.cost for row in signatures]
    costly = [
        not cost.is_known or cost.flops > 1 or cost.bytes_read + cost.bytes_written > _MAX_SCALAR_BYTES
        for cost in costs
    ]
    nodes = [
        node
        for node, (signature, region) in enumerate(zip(template.signature, template.region, strict=True))
        if costly[signature] and parts[within[region] if region >= 0 else frozenset()] > 1
    ]
    return nodes, max(parts.values())


_MAX_SCALAR_BYTES = 64.0
"""Largest number of bytes that an operation on scalars moves."""
