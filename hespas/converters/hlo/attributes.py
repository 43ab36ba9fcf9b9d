"""Parsers of attribute values in HLO text: lists, windows, dimension labels, metadata, backend
configurations.

Every function raises ``ValueError`` that states the expected text; callers add file and line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from math import prod

import msgspec
import numpy as np

from hespas.converters.hlo.scan import STRING, strip_comments, unquote
from hespas.converters.replica_groups import dense_groups, mesh_groups
from hespas.costs.operation import WindowDim
from hespas.graph import ExplicitGroups, GroupSet, StridedGroups
from hespas.graph.columns import IntArray

__all__ = [
    "CALLEE_KEYS",
    "PAIRS_KEY",
    "HloBackendConfig",
    "Mesh",
    "backend_config",
    "callee_names",
    "dim_labels",
    "donated_parameters",
    "fields",
    "frontend_pairs",
    "header_meshes",
    "int_rows",
    "integer",
    "ints",
    "is_true",
    "names",
    "parse_groups",
    "window",
    "written_over",
]

CALLEE_KEYS = (
    "calls",
    "to_apply",
    "condition",
    "body",
    "true_computation",
    "false_computation",
    "branch_computations",
    "called_computations",
    "select",
    "scatter",
)
"""Attributes that name computations."""

_CALLEES = frozenset(CALLEE_KEYS)

PAIRS_KEY = "_xla_send_recv_source_target_pairs"
"""Frontend attribute with the source-target pairs of a send or receive."""

_FIELD = re.compile(rf"""([A-Za-z_][\w.\-]*)(?:\s*=\s*({STRING}|\{{[^{{}}]*\}}|[^\s,"'{{}}]+))?""", re.DOTALL)
"""A name with an optional value; a name without a value is matched as a whole, so that matching is linear."""

_ALIAS = re.compile(r"\{([\d,\s]*)\}\s*:\s*\(\s*(\d+)\s*,\s*\{([\d,\s]*)\}")
_DONOR = re.compile(r"\(\s*(\d+)\s*,")
_MAX_DIGITS = 18


def integer(text: str) -> int:
    """Parse an integer of at most 18 digits."""
    digits = text.strip().removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > _MAX_DIGITS:
        raise ValueError(f"expected an integer, found {text.strip()[:40]!r}")
    return int(text)


def _inside(value: str) -> str:
    """Return the text between the braces of ``{...}``, without comments."""
    clean = strip_comments(value).strip()
    if not (clean.startswith("{") and clean.endswith("}")):
        raise ValueError(f"expected a list in braces, found {value[:40]!r}")
    return clean[1:-1]


def ints(value: str | None) -> tuple[int, ...]:
    """Parse ``{1,2}`` to (1, 2); an absent attribute is an empty list."""
    if value is None:
        return ()
    inner = _inside(value)
    return tuple(map(integer, inner.split(","))) if inner.strip() else ()


def int_rows(value: str) -> list[list[int]]:
    """Parse ``{{0,1},{2,3}}`` to rows. O(text)."""
    rows: list[list[int]] = []
    parts = _inside(value).split("}")
    for index, part in enumerate(parts):
        lead, brace, inner = part.partition("{")
        if not brace and index == len(parts) - 1 and not lead.strip():
            break
        if not brace or "{" in inner or lead.strip() not in {"", ","}:
            raise ValueError(f"expected a list of lists such as {{{{0,1}},{{2,3}}}}, found {value[:40]!r}")
        rows.append([integer(item) for item in inner.split(",")] if inner.strip() else [])
    return rows


def names(value: str | None) -> tuple[str, ...]:
    """Parse ``%a`` or ``{%a, %b}`` to names without ``%``."""
    if value is None:
        return ()
    if not value.startswith("{"):
        return (value.lstrip("%"),)
    inner = _inside(value)
    return tuple(part.strip().lstrip("%") for part in inner.split(",") if part.strip())


def callee_names(attributes: Mapping[str, str]) -> tuple[str, ...]:
    """Return the computations that an instruction refers to, in the order of :data:`CALLEE_KEYS`."""
    if _CALLEES.isdisjoint(attributes):
        return ()
    return tuple(name for key in CALLEE_KEYS if key in attributes for name in names(attributes[key]))


def fields(value: str) -> dict[str, str]:
    """Parse ``{op_name="a b" stack_frame_id=3}`` to its fields; strings are unquoted."""
    return {match[1]: unquote(match[2]) for match in _FIELD.finditer(value) if match[2]}


def frontend_pairs(attributes: Mapping[str, str]) -> str | None:
    """Return the source-target pairs in the frontend attributes of a send or receive as text, None if
    missing.
    """
    text = attributes.get("frontend_attributes", "")
    start = text.find(PAIRS_KEY)
    if start < 0:
        return None
    rest = text[start + len(PAIRS_KEY) :].lstrip(" =")
    if rest.startswith('"'):
        return unquote(fields("{pairs=" + rest).get("pairs", ""))
    end = rest.find("}}")
    return rest[: end + 2] if end >= 0 else None


def is_true(value: str | None) -> bool:
    """Return True if a boolean attribute is ``true``."""
    return value in {"true", "1"}


def _by(value: str, rank: int, name: str) -> list[list[int]]:
    """Parse a list of numbers per dimension: ``1_1x0_2`` gives [[1, 1], [0, 2]]."""
    parts = [[integer(item) for item in part.split("_")] for part in value.split("x")]
    if len(parts) != rank:
        raise ValueError(f"expected {rank} window dimensions in {name}, found {value[:40]!r}")
    return parts


def window(value: str | None) -> tuple[WindowDim, ...]:
    """Parse ``{size=3x3 stride=2x2 pad=1_1x1_1 lhs_dilate=1x1 rhs_dilate=1x1}``, one entry per dimension."""
    if value is None:
        return ()
    texts = fields(value)
    size = texts.get("size", "")
    if not size:
        return ()
    rank = size.count("x") + 1
    ones = "x".join(["1"] * rank)
    columns = [
        [row[0] for row in _by(texts.get(name, ones), rank, name)]
        for name in ("size", "stride", "lhs_dilate", "rhs_dilate")
    ]
    pads = _by(texts.get("pad", "x".join(["0_0"] * rank)), rank, "pad")
    if any(len(pad) < 2 for pad in pads) or min(min(column) for column in columns) < 0:
        raise ValueError(f"expected a window such as {{size=3x3 pad=1_1x1_1}}, found {value[:60]!r}")
    return tuple(
        WindowDim(extent, stride, pad[0], pad[1], lhs, rhs)
        for extent, stride, lhs, rhs, pad in zip(*columns, pads, strict=True)
    )


def dim_labels(value: str) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Parse the dimension labels of a convolution, such as ``b01f_01io->b01f``. Return three dictionaries,
    for input, kernel and output, from each label to its position.
    """
    left, arrow, output = value.partition("->")
    source, underscore, kernel = left.partition("_")
    if not arrow or not underscore:
        raise ValueError(f"expected dimension labels such as b01f_01io->b01f, found {value[:40]!r}")
    positions = tuple(
        {label: position for position, label in enumerate(part)} for part in (source, kernel, output)
    )
    required = ("bf", "io", "bf")
    if any(
        label not in labels_of
        for labels_of, labels in zip(positions, required, strict=True)
        for label in labels
    ):
        raise ValueError(f"expected dimension labels such as b01f_01io->b01f, found {value[:40]!r}")
    return positions[0], positions[1], positions[2]


def donated_parameters(header: Mapping[str, str]) -> frozenset[int]:
    """Return the numbers of entry parameters whose buffer the program may overwrite."""
    aliases = [match[2] for match in _ALIAS.finditer(header.get("input_output_alias", ""))]
    donors = _DONOR.findall(header.get("buffer_donor", ""))
    return frozenset(int(number) for number in (*aliases, *donors) if len(number) <= _MAX_DIGITS)


def written_over(header: Mapping[str, str]) -> dict[int, int]:
    """Return the entry parameters whose buffers results overwrite: parameter number -> index of the result.
    Parameters of tuple type and results in nested tuples are left out.
    """
    result_of: dict[int, int] = {}
    for result, number, part in _ALIAS.findall(header.get("input_output_alias", "")):
        result_index = result.strip() or "0"
        if result_index.isdigit() and not part.strip() and max(len(result_index), len(number)) <= _MAX_DIGITS:
            result_of[int(number)] = int(result_index)
    return result_of


class _TripCountConfig(msgspec.Struct, frozen=True):
    n: int = -1


class _CollectiveConfig(msgspec.Struct, frozen=True):
    is_sync: bool = False


class HloBackendConfig(msgspec.Struct, frozen=True):
    """Fields of a backend configuration in JSON that the reader uses; numbers may be strings."""

    known_trip_count: _TripCountConfig | None = None
    is_sync: bool = False
    collective_backend_config: _CollectiveConfig | None = None

    @property
    def trips(self) -> int:
        """Trip count of a loop, -1 if missing."""
        return -1 if self.known_trip_count is None else self.known_trip_count.n

    @property
    def synchronous(self) -> bool:
        """True if an asynchronous collective was made synchronous."""
        nested = self.collective_backend_config
        return self.is_sync or (nested is not None and nested.is_sync)


_NO_CONFIG = HloBackendConfig()


def backend_config(attributes: Mapping[str, str]) -> HloBackendConfig:
    """Return the backend configuration of one instruction. A configuration that is not JSON counts as
    empty.
    """
    text = attributes.get("backend_config")
    if text is None:
        return _NO_CONFIG
    try:
        return msgspec.json.decode(unquote(text).encode(), type=HloBackendConfig, strict=False)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return _NO_CONFIG


Mesh = dict[str, int]
"""Axis name -> extent, in order."""

_IOTA = re.compile(r"\[([\d,\s]+)\]\s*<=\s*\[([\d,\s]+)\]\s*(?:T\(([\d,\s]+)\))?")
_MESH = re.compile(r"(?:@?mesh\s*\[([^\]]*)\]|@([\w.\-]+)(?:\s*\[([^\]]*)\])?)\s*")
_DEVICE_IDS = re.compile(r",\s*device_ids\s*=\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*")
_DEVICE_IOTA = re.compile(r"\[([\d,\s]+)\]\s*(?:T\(([\d,\s]+)\))?")
_AXIS = re.compile(r"""\s*['"]?([^'"=,\s]+)['"]?\s*=\s*(\d{1,18})\s*,?""")
_AXIS_REFERENCE = re.compile(r"""\s*['"]?([^'":,\s{}]+)['"]?(?:\s*:\s*\((\d{1,18})\)(\d{1,18}))?\s*,?""")
_HEADER_MESH = re.compile(r"([\w.\-]+)(?:\s*=\s*#sdy\.mesh<\[([^\]<]*)\])?")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(integer(part) for part in text.split(","))


def _axes(text: str) -> Mesh:
    """Parse the axes of a mesh, ``'a'=2,'b'=4``, to extents by name."""
    axes: Mesh = {}
    position = 0
    while position < len(text):
        match = _AXIS.match(text, position)
        if match is None or match[1] in axes:
            raise ValueError(f"expected mesh axes such as 'a'=2,'b'=4, found {text[:60]!r}")
        axes[match[1]] = int(match[2])
        position = match.end()
    return axes


def header_meshes(header: Mapping[str, str]) -> dict[str, Mesh]:
    """Return the meshes in a module's header (``xla.sdy.meshes`` of its frontend attributes)."""
    text = header.get("frontend_attributes", "").replace('\\"', '"')
    return {match[1]: _axes(match[2]) for match in _HEADER_MESH.finditer(text) if match[2] is not None}


def parse_groups(text: str | None, num_devices: int, meshes: Mapping[str, Mesh]) -> GroupSet | None:
    """Parse ``replica_groups`` to groups of the ids in the text. Return None for an absent or empty list,
    which means all devices.

    Accepted forms: ``{{0,1},{2,3}}``, ``{}``, ``[4,2]<=[8]``, ``[4,2]<=[2,4]T(1,0)``, ``mesh['a'=2,'b'=4]
    {'a'}`` with sub-axes ``'a':(1)2`` and ``device_ids=([4,2]T(1,0))`` or a list, and ``@mesh {'a'}`` for a
    mesh in the header. ``num_devices`` limits the ids of a symbolic form. Raises ``ValueError``.
    """
    if text is None:
        return None
    if text.startswith("["):
        match = _IOTA.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"expected groups such as [4,2]<=[2,4]T(1,0), found {text[:60]!r}")
        tile, dims = _numbers(match[1]), _numbers(match[2])
        if len(tile) != 2 or min(*tile, *dims) < 1:
            raise ValueError(f"expected [groups,size] of positive numbers, found {text[:60]!r}")
        _bound(prod(tile), num_devices)
        return StridedGroups.from_iota(tile[0], tile[1], dims, _numbers(match[3]) if match[3] else None)
    if text.startswith(("mesh", "@")):
        match = _MESH.match(text)
        if match is None:
            raise ValueError(f"expected groups such as mesh['a'=2,'b'=4] {{'a'}}, found {text[:60]!r}")
        inline = match[1] if match[1] is not None else match[3]
        if inline is None and match[2] not in meshes:
            raise ValueError(f"expected a mesh the header names, found @{match[2][:60]}")
        axes = meshes[match[2]] if inline is None else _axes(inline)
        _bound(prod(axes.values()), num_devices)
        listed = _DEVICE_IDS.match(text, match.end())
        ids = _device_ids(listed[1], num_devices) if listed else None
        rest = text[(listed or match).end() :].strip()
        chosen = _references(rest, axes)
        return mesh_groups(tuple(axes.values()), chosen, ids)
    rows = int_rows(text)
    if not rows or rows == [[]]:
        return None
    # Rows of equal length as an array, None where lengths differ.
    lengths = [len(row) for row in rows]
    if any(a != b for a, b in pairwise(lengths)):
        dense = None
    else:
        dense = np.array(rows, np.int64).reshape(len(rows), -1)
    return ExplicitGroups.from_rows(rows) if dense is None else dense_groups(dense)


def _bound(named: int, num_devices: int) -> None:
    if named > num_devices:
        raise ValueError(f"expected groups over at most {num_devices} devices, found {named:,}")


def _references(text: str, axes: Mesh) -> list[tuple[int, int, int]]:
    """Parse mesh axes and parts of axes, ``{'a', 'b':(1)2}``, to (axis, pre-size, size) in the order of the
    text.
    """
    if not (text.startswith("{") and text.endswith("}")):
        raise ValueError(f"expected the axes of a group such as {{'a'}}, found {text[:60]!r}")
    order = list(axes)
    inner, position = text[1:-1].rstrip(), 0
    references: list[tuple[int, int, int]] = []
    while position < len(inner):
        match = _AXIS_REFERENCE.match(inner, position)
        if match is None or match[1] not in axes:
            raise ValueError(f"expected axes of the mesh {order}, found {text[:60]!r}")
        whole = (1, axes[match[1]])
        pre, size = (int(match[2]), int(match[3])) if match[2] else whole
        references.append((order.index(match[1]), pre, size))
        position = match.end()
    return references


def _device_ids(text: str, num_devices: int) -> IntArray:
    """Parse the device ids of a mesh, ``[4,4]T(1,0)`` or ``0,2,1,3``, to an array in row-major order of the
    mesh.
    """
    match = _DEVICE_IOTA.fullmatch(text.strip())
    if match is None:
        return np.array(_numbers(text), np.int64)
    dims = _numbers(match[1])
    _bound(prod(dims), num_devices)
    ids = np.arange(prod(dims), dtype=np.int64).reshape(dims)
    order = _numbers(match[2]) if match[2] else tuple(range(len(dims)))
    if sorted(order) != list(range(len(dims))):
        raise ValueError(f"expected T(...) as a permutation of {len(dims)} dimensions, found {text[:60]!r}")
    return ids.transpose(order).reshape(-1)
