"""Collectives and point-to-point operations: attributes to groups, pairs and payloads.

Groups stay as the program states them, with their mode, until the whole module is read and the number of
replicas and partitions is known; then :func:`hespas.converters.replica_groups.normalise_groups` makes them
global.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from hespas.converters.replica_groups import (
    MAX_DEVICES,
    IdMode,
    dense_groups,
    group_mode,
    highest_id,
    mesh_groups,
)
from hespas.converters.stablehlo.mlir import (
    Attribute,
    Bindings,
    Operation,
    defining_op,
    int_array,
    is_true,
    place_of,
    quoted,
    string_in,
    text_of,
)
from hespas.converters.stablehlo.types import Signature, TypeInfo
from hespas.costs.table import COLLECTIVE_KINDS, payload
from hespas.graph import CollectiveKind, GroupSet, NodeKind
from hespas.graph.errors import FormatError

if TYPE_CHECKING:
    from jaxlib.mlir._mlir_libs._sdy import MeshAttr, MeshAxisAttr
    from jaxlib.mlir._mlir_libs._stablehlo import AxisRefAttr, SubAxisInfoAttr

    from hespas.converters.stablehlo.module import Frame
    from hespas.converters.stablehlo.template import Template

__all__ = [
    "COMMUNICATION",
    "EVERY_AXIS",
    "Collective",
    "Communication",
    "CommunicationReader",
    "Mesh",
    "Message",
    "Shardings",
    "entered_axes",
    "global_nodes",
    "manual_axes",
    "read_mesh",
]

COMMUNICATION: frozenset[str] = frozenset({*COLLECTIVE_KINDS, "collective_permute", "send", "recv"})
"""Canonical names of operations that talk to other devices."""

_STATED = (
    "replica_groups",
    "source_target_pairs",
    "channel_handle",
    "use_global_device_ids",
    "is_host_transfer",
)
_Pairs = tuple[tuple[int, int], ...]


class Collective(NamedTuple):
    """One collective as stated. ``groups`` None: one group of everybody."""

    kind: CollectiveKind
    groups: GroupSet | None
    mode: IdMode
    channel: int
    reduction: str
    operand_bytes: float
    result_bytes: float

    def comm_bytes(self, group_size: int) -> float:
        """The size a Chakra trace states."""
        return payload(self.kind, self.operand_bytes, self.result_bytes, group_size).comm_bytes


class Message(NamedTuple):
    """One permute, send or receive as stated. ``pairs`` None: the peer is not stated.

    ``mode`` None: ids of whatever there are several of, as XLA reads the pairs of ``send`` and ``recv``.
    """

    kind: NodeKind
    pairs: _Pairs | None
    mode: IdMode | None
    tag: int
    comm_bytes: float
    is_host: bool = False


Communication = Collective | Message


class Mesh(NamedTuple):
    """Named axes with their extents, and the devices where they are not 0, 1, 2, ...."""

    axes: tuple[tuple[str, int], ...]
    device_ids: tuple[int, ...] = ()


class CommunicationReader:
    """Decodes communications of one module; equal group attributes are decoded once."""

    def __init__(self, bindings: Bindings, meshes: Mapping[str, Mesh]) -> None:
        self._bindings = bindings
        self._meshes = meshes
        self._groups: dict[Attribute, GroupSet | None] = {}
        self._known: dict[tuple[object, ...], int] = {}
        self.rows: list[Communication] = []

    def row(
        self,
        canonical: str,
        op: Operation,
        operands: tuple[TypeInfo, ...],
        results: tuple[TypeInfo, ...],
        reduction: str,
    ) -> int:
        """The row in ``rows`` of what an operation communicates; equal ones share a row.

        Raises ``FormatError`` for contradictory attributes.
        """
        stated = tuple([op.attributes.get(name) for name in _STATED])
        key = (canonical, stated, operands, results, reduction)
        row = self._known.get(key)
        if row is not None:
            return row
        sizes = [
            sum(tensor.bytes for info in infos for tensor in info.tensors) for infos in (operands, results)
        ]
        try:
            communication = self._read(canonical, op, sizes[0], sizes[1], reduction)
            _check_ids(communication)
        except ValueError as error:
            raise FormatError(
                f"{op.name}: {error}",
                position=place_of(str(op.location)),
                hint="correct the groups or pairs of this operation",
            ) from error
        self.rows.append(communication)
        row = self._known[key] = len(self.rows) - 1
        return row

    def _read(
        self, canonical: str, op: Operation, operand_bytes: float, result_bytes: float, reduction: str
    ) -> Communication:
        channel = self._channel(op)
        tag = channel if channel > 0 else -1
        if canonical in {"send", "recv"}:
            kind, size = (
                (NodeKind.SEND, operand_bytes) if canonical == "send" else (NodeKind.RECV, result_bytes)
            )
            return Message(kind, self._pairs(op), None, tag, size, is_true(op, "is_host_transfer"))
        use_global = is_true(op, "use_global_device_ids")
        mode = group_mode(canonical, channel, use_global_device_ids=use_global)
        if canonical == "collective_permute":
            return Message(NodeKind.PERMUTE, self._pairs(op) or (), mode, tag, operand_bytes)
        attribute = op.attributes.get("replica_groups")
        groups = None if attribute is None else self._decoded(attribute)
        if attribute is not None and self._is_mesh(attribute):
            mode = IdMode.FLATTENED_IDS
        return Collective(
            COLLECTIVE_KINDS[canonical], groups, mode, tag, reduction, operand_bytes, result_bytes
        )

    def _pairs(self, op: Operation) -> _Pairs | None:
        attribute = op.attributes.get("source_target_pairs")
        if attribute is None:
            return None
        rows = int_array(attribute)
        if rows.size == 0:
            return None
        if rows.ndim != 2 or rows.shape[1] != 2:
            raise ValueError(f"source_target_pairs has shape {rows.shape}, not (pairs, 2)")
        return tuple((int(source), int(target)) for source, target in rows.tolist())

    def _channel(self, op: Operation) -> int:
        attribute = op.attributes.get("channel_handle")
        if attribute is None:
            return 0
        return int(self._bindings.dialect_of(op.name).ChannelHandle(attribute).handle)

    def _is_mesh(self, attribute: Attribute) -> bool:
        return bool(self._bindings.stablehlo.ReplicaGroupMeshAxesAttr.isinstance(attribute))

    def _decoded(self, attribute: Attribute) -> GroupSet | None:
        if attribute not in self._groups:
            is_mesh = self._is_mesh(attribute)
            self._groups[attribute] = (
                self._mesh_axes(attribute) if is_mesh else dense_groups(int_array(attribute))
            )
        return self._groups[attribute]

    def _mesh_axes(self, attribute: Attribute) -> GroupSet:
        """``replica_group_mesh_axes``: a mesh, inline or of the module, and the axes a group varies over."""
        dialect = self._bindings.stablehlo
        stated = dialect.ReplicaGroupMeshAxesAttr(attribute)
        is_inline = not str(stated.mesh).startswith("@")
        mesh = read_mesh(stated.mesh, dialect) if is_inline else self._meshes.get(string_in(stated.mesh))
        if mesh is None:
            raise ValueError(f"the module has no mesh {quoted(str(stated.mesh))}")
        names = [name for name, _ in mesh.axes]
        axes: list[tuple[int, int, int]] = []
        for each in cast("Sequence[Attribute]", stated.axes):
            reference = cast("AxisRefAttr", dialect.AxisRefAttr(each))
            if reference.name not in names:
                raise ValueError(f"the mesh has no axis {reference.name!r}")
            place = names.index(reference.name)
            part = reference.sub_axis_info
            sub = None if part is None else cast("SubAxisInfoAttr", dialect.SubAxisInfoAttr(part))
            pre, size = (1, mesh.axes[place][1]) if sub is None else (sub.pre_size, sub.size)
            axes.append((place, pre, size))
        ids = np.array(mesh.device_ids, np.int64) if mesh.device_ids else None
        return mesh_groups([extent for _, extent in mesh.axes], axes, ids)


def _check_ids(communication: Communication) -> None:
    """Ids decide how many devices there are where the module does not say."""
    if isinstance(communication, Message):
        highest = max((rank for pair in communication.pairs or () for rank in pair), default=0)
    else:
        highest = highest_id(communication.groups)
    if highest >= MAX_DEVICES:
        raise ValueError(f"device id {highest:,} is out of range (at most {MAX_DEVICES:,} devices are read)")


def read_mesh(attribute: Attribute, dialect: ModuleType) -> Mesh:
    """A ``#sdy.mesh`` or ``#stablehlo.mesh`` attribute."""
    stated = cast("MeshAttr", dialect.MeshAttr(attribute))
    axes = [cast("MeshAxisAttr", dialect.MeshAxisAttr(axis)) for axis in stated.axes]
    listed = cast("object", stated.device_ids)  # that of StableHLO may be None
    ids = () if listed is None else tuple(np.array(listed).astype(np.int64).reshape(-1).tolist())
    return Mesh(tuple((axis.name, axis.size) for axis in axes), ids)


# --- Which work of a program has the shapes of the whole job: what is sharded, and not yet partitioned.
#
# Shardings say over which mesh axes data is split; within manual computations (``shard_map``) shapes are
# those of one device over the axes that are manual there. Work is global where some axis in use is not
# manual. There are two spellings: Shardy's axes by name, and GSPMD's tiles, which have no names: there a
# manual part counts by how many devices it is split over (:data:`EVERY_AXIS` for all of them). A
# partitioned program, which may still bear its shardings, communications data outside of every manual
# computation.


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
_DIMENSIONS = re.compile(r"(?:@[^,<>\[\]{}]+|mesh<[^<>]*>), ?\[((?:\{[^{}\[\]]*\}(?:p\d+)?(?:, ?)?)+)\]")
"""The dimensions of a sharding of Shardy's behind its mesh: ``@mesh, [{"x", "y"}, {?}]``. Lists of attributes
of arguments and results hold other names: ``[{jax.result_info = "result"}]``.
"""
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
        if maker is None or text_of(maker, "call_target_name") not in _INTO_SHARDS:
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
    template: Template, signatures: list[Signature], communications: list[Communication], shardings: Shardings
) -> tuple[list[int], int]:
    """The nodes whose shapes are those of the whole job, and into how many parts that work splits at most;
    none in a program that communications data outside of manual computations. O(nodes + regions).
    """
    within: list[frozenset[str]] = []
    for each in template.regions:  # parents first
        within.append(each.manual | (within[each.parent] if each.parent >= 0 else frozenset[str]()))
    for node, row in template.links:
        communication, region = communications[row], template.region[node]
        is_host = isinstance(communication, Message) and communication.is_host
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
