"""Attribute values of HLO instructions, from their text: lists, windows, dimension labels, metadata,
configuration.

Every function raises ``ValueError`` naming what was expected; callers add file and line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

import msgspec
import numpy as np

from hespas.converters.hlo.scan import STRING, strip_comments, unquote
from hespas.costs import WindowDim
from hespas.graph.columns import IntArray

__all__ = [
    "CALLEE_KEYS",
    "PAIRS_KEY",
    "BackendConfig",
    "backend_config",
    "callee_names",
    "dim_labels",
    "donated_parameters",
    "fields",
    "frontend_pairs",
    "int_rows",
    "integer",
    "ints",
    "is_true",
    "names",
    "rows_array",
    "window",
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
"""The frontend attribute that says who sends to whom."""

_FIELD = re.compile(rf"""([A-Za-z_][\w.\-]*)(?:\s*=\s*({STRING}|\{{[^{{}}]*\}}|[^\s,"'{{}}]+))?""", re.DOTALL)
"""A name with its value; a name without one is passed in one piece, so that its end is looked for once."""

_ALIAS = re.compile(r"\{[\d,\s]*\}\s*:\s*\(\s*(\d+)\s*,\s*\{[\d,\s]*\}")
_DONOR = re.compile(r"\(\s*(\d+)\s*,")
_MAX_DIGITS = 18


def integer(text: str) -> int:
    """One integer of at most 18 digits."""
    digits = text.strip().removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > _MAX_DIGITS:
        raise ValueError(f"expected an integer, found {text.strip()[:40]!r}")
    return int(text)


def _inside(value: str) -> str:
    """What stands between the braces, comments removed."""
    clean = strip_comments(value).strip()
    if not (clean.startswith("{") and clean.endswith("}")):
        raise ValueError(f"expected a list in braces, found {value[:40]!r}")
    return clean[1:-1]


def ints(value: str | None) -> tuple[int, ...]:
    """``{1,2}`` -> (1, 2); an absent attribute is an empty list."""
    if value is None:
        return ()
    inner = _inside(value)
    return tuple(map(integer, inner.split(","))) if inner.strip() else ()


def int_rows(value: str) -> list[list[int]]:
    """``{{0,1},{2,3}}`` -> rows. O(text)."""
    rows: list[list[int]] = []
    parts = _inside(value).split("}")
    for place, part in enumerate(parts):
        lead, brace, inner = part.partition("{")
        if not brace and place == len(parts) - 1 and not lead.strip():
            break
        if not brace or "{" in inner or lead.strip() not in {"", ","}:
            raise ValueError(f"expected a list of lists such as {{{{0,1}},{{2,3}}}}, found {value[:40]!r}")
        rows.append([integer(item) for item in inner.split(",")] if inner.strip() else [])
    return rows


def names(value: str | None) -> tuple[str, ...]:
    """``%a`` or ``{%a, %b}`` -> names without ``%``."""
    if value is None:
        return ()
    if not value.startswith("{"):
        return (value.lstrip("%"),)
    inner = _inside(value)
    return tuple(part.strip().lstrip("%") for part in inner.split(",") if part.strip())


def callee_names(attributes: Mapping[str, str]) -> tuple[str, ...]:
    """Every computation an instruction names, in the order of :data:`CALLEE_KEYS`."""
    if _CALLEES.isdisjoint(attributes):
        return ()
    return tuple(name for key in CALLEE_KEYS if key in attributes for name in names(attributes[key]))


def fields(value: str) -> dict[str, str]:
    """``{op_name="a b" stack_frame_id=3}`` -> its fields, strings without quotes and escapes."""
    return {match[1]: unquote(match[2]) for match in _FIELD.finditer(value) if match[2]}


def frontend_pairs(attributes: Mapping[str, str]) -> str | None:
    """The pairs a send or receive states for its channel."""
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
    """Whether a flag is set."""
    return value in {"true", "1"}


def _by(value: str, rank: int, name: str) -> list[list[int]]:
    """``1_1x0_2`` -> [[1, 1], [0, 2]], one entry per dimension."""
    parts = [[integer(item) for item in part.split("_")] for part in value.split("x")]
    if len(parts) != rank:
        raise ValueError(f"expected {rank} window dimensions in {name}, found {value[:40]!r}")
    return parts


def window(value: str | None) -> tuple[WindowDim, ...]:
    """``{size=3x3 stride=2x2 pad=1_1x1_1 lhs_dilate=1x1 rhs_dilate=1x1}`` -> one entry per dimension."""
    if value is None:
        return ()
    found = fields(value)
    size = found.get("size", "")
    if not size:
        return ()
    rank = size.count("x") + 1
    ones = "x".join(["1"] * rank)
    columns = [
        [row[0] for row in _by(found.get(name, ones), rank, name)]
        for name in ("size", "stride", "lhs_dilate", "rhs_dilate")
    ]
    pads = _by(found.get("pad", "x".join(["0_0"] * rank)), rank, "pad")
    if any(len(pad) < 2 for pad in pads) or min(min(column) for column in columns) < 0:
        raise ValueError(f"expected a window such as {{size=3x3 pad=1_1x1_1}}, found {value[:60]!r}")
    return tuple(
        WindowDim(extent, stride, pad[0], pad[1], lhs, rhs)
        for extent, stride, lhs, rhs, pad in zip(*columns, pads, strict=True)
    )


def dim_labels(value: str) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """``b01f_01io->b01f`` -> the place of each label in input, kernel and output."""
    left, arrow, output = value.partition("->")
    source, underscore, kernel = left.partition("_")
    if not arrow or not underscore:
        raise ValueError(f"expected dimension labels such as b01f_01io->b01f, found {value[:40]!r}")
    places = tuple({label: place for place, label in enumerate(part)} for part in (source, kernel, output))
    required = ("bf", "io", "bf")
    if any(label not in found for found, labels in zip(places, required, strict=True) for label in labels):
        raise ValueError(f"expected dimension labels such as b01f_01io->b01f, found {value[:40]!r}")
    return places[0], places[1], places[2]


def donated_parameters(header: Mapping[str, str]) -> frozenset[int]:
    """Numbers of entry parameters whose buffer the program may overwrite."""
    aliases = _ALIAS.findall(header.get("input_output_alias", ""))
    donors = _DONOR.findall(header.get("buffer_donor", ""))
    return frozenset(int(number) for number in (*aliases, *donors) if len(number) <= _MAX_DIGITS)


class _Count(msgspec.Struct, frozen=True):
    n: int = -1


class _CollectiveConfig(msgspec.Struct, frozen=True):
    is_sync: bool = False


class BackendConfig(msgspec.Struct, frozen=True):
    """The fields of a JSON backend configuration that matter here; numbers may be spelled as strings."""

    known_trip_count: _Count | None = None
    is_sync: bool = False
    collective_backend_config: _CollectiveConfig | None = None

    @property
    def trips(self) -> int:
        """The trip count of a loop, -1 where not stated."""
        return -1 if self.known_trip_count is None else self.known_trip_count.n

    @property
    def synchronous(self) -> bool:
        """Whether an asynchronous collective was made synchronous."""
        nested = self.collective_backend_config
        return self.is_sync or (nested is not None and nested.is_sync)


_NO_CONFIG = BackendConfig()


def backend_config(attributes: Mapping[str, str]) -> BackendConfig:
    """The configuration of one instruction; one in another syntax reads as empty."""
    text = attributes.get("backend_config")
    if text is None:
        return _NO_CONFIG
    try:
        return msgspec.json.decode(unquote(text).encode(), type=BackendConfig, strict=False)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return _NO_CONFIG


def rows_array(rows: list[list[int]]) -> IntArray | None:
    """Rows of equal length as an array, None where lengths differ."""
    lengths = [len(row) for row in rows]
    if any(a != b for a, b in pairwise(lengths)):
        return None
    return np.array(rows, np.int64).reshape(len(rows), -1)
