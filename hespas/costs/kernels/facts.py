"""What the name of a kernel says of its work, and one row of the table of patterns that says it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from hespas.costs.kernels.names import KernelName
from hespas.graph import OpClass, find_dtype

__all__ = [
    "Cover",
    "KernelFacts",
    "Reader",
    "Row",
    "any_of",
    "cute_shapes",
    "element_type",
    "first_element_type",
    "spelled_type",
    "type_in_text",
    "widest_type",
]


class Cover(Enum):
    """How the blocks of a launch share the result."""

    UNKNOWN = "unknown"
    """They may loop: their number says nothing of the work."""
    AT_MOST = "at most"
    """No block makes more than it states; some may make nothing."""
    ONCE = "once"
    """One range, cut evenly: all blocks but the last are full."""
    ROWS = "rows"
    """Each block makes a row, or several, of at least and at most so many elements."""
    AT_LEAST = "at least"
    """Each block makes one tile of a matrix, or several."""
    TILES = "tiles"
    """Tiles of a matrix along x and y, and a matrix for each z: all but the last row and column are full."""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What a name states; the empty text, class UNKNOWN and the empty tuple where it does not.

    ``library`` is whose kernel it is (``hipBLASLt``), ``family`` what it does there (``gemm``). ``dtype`` is
    the type of its operands as the hub spells it, ``result_dtype`` that of what it writes where that is
    stated, too. ``tile`` is what one block makes of a result: (M, N, K) of a matrix product, (queries, keys)
    of an attention. ``sizes`` are extents of the problem itself, where the name was generated for one.

    ``cover`` says how blocks share the result: each makes at most ``per_block`` elements and ``per_thread``
    for each of its threads, at least those ``_low`` where it is full (0: not stated). ``arrays`` are read and
    written one element for each of the result (0 unknown), none with elements of more than ``widest`` bytes.
    """

    op_class: OpClass = OpClass.UNKNOWN
    library: str = ""
    family: str = ""
    dtype: str = ""
    tile: tuple[int, ...] = ()
    result_dtype: str = ""
    layout: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    cover: Cover = Cover.UNKNOWN
    per_block: float = 0.0
    per_thread: float = 0.0
    per_block_low: float = 0.0
    per_thread_low: float = 0.0
    arrays: int = 0
    widest: float = 0.0


Reader = Callable[[KernelFacts, KernelName, re.Match[str]], KernelFacts]
"""Adds what else a name says to the facts that the groups of the pattern give."""


@dataclass(frozen=True, slots=True)
class Row:
    """One pattern, searched in the qualified name, or with ``whole`` in all of the text.

    Groups of the pattern named ``m``, ``n`` and ``k`` are the tile, ``type`` and ``out`` the element types,
    ``layout`` the layout. Without a group ``type`` the first element type among the template arguments is
    taken. ``read`` reads what else the name says. ``cover``: how blocks share the result, each a tile.
    """

    pattern: str
    library: str
    family: str
    op_class: OpClass
    whole: bool = False
    read: Reader | None = None
    cover: Cover = Cover.UNKNOWN
    compiled: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        """Compile the pattern."""
        object.__setattr__(self, "compiled", re.compile(self.pattern))

    def facts(self, name: KernelName) -> KernelFacts | None:
        """What the row says of a name; None where its pattern is not found."""
        found = self.compiled.search(name.text if self.whole else name.qualified)
        if found is None:
            return None
        groups = {key: value for key, value in found.groupdict().items() if value}
        stated = KernelFacts(
            self.op_class,
            self.library,
            self.family,
            dtype=spelled_type(groups["type"]) if "type" in groups else first_element_type(name),
            tile=tuple(int(groups[key]) for key in ("m", "n", "k") if key in groups),
            result_dtype=spelled_type(groups.get("out", "")),
            layout=groups.get("layout", ""),
        )
        if self.cover is not Cover.UNKNOWN and len(stated.tile) > 1:
            stated = replace(stated, cover=self.cover, per_block=float(stated.tile[0] * stated.tile[1]))
        return stated if self.read is None else self.read(stated, name, found)


def any_of(words: str) -> str:
    """A pattern for any of some words, which are patterns themselves, without spaces."""
    return f"(?:{'|'.join(words.split())})"


def widest_type(text: str) -> float:
    """Bytes of the widest element type that a text names, 0 for none."""
    found = {*_TYPE_WORD.findall(text), *_WHOLE_NUMBER.findall(text)}
    types = (find_dtype(spelled_type(each)) for each in found)
    return max((float(each.storage_bytes(1)) for each in types if each is not None), default=0.0)


_CUTE_EXTENT = r"(?:cute::)?(?:C|constant<int,) ?<?(?:\(int\))?(\d{1,5})>?"
_CUTE_SHAPE = re.compile(rf"tuple<{_CUTE_EXTENT}, ?{_CUTE_EXTENT}, ?{_CUTE_EXTENT} ?>")


def cute_shapes(text: str) -> list[tuple[int, int, int]]:
    """Shapes of three constants in the order of the text: ``tuple<C<128>, C<176>, C<64>>``."""
    return [(int(m), int(n), int(k)) for m, n, k in _CUTE_SHAPE.findall(text)]


def type_in_text(stated: KernelFacts, name: KernelName, found: re.Match[str]) -> KernelFacts:
    """A reader: the first element type anywhere in the name."""
    return replace(stated, dtype=element_type(name.text))


_SPELLED = {
    "half": "f16",
    "__half": "f16",
    "_float16": "f16",
    "half_t": "f16",
    "bfloat16_t": "bf16",
    "__nv_bfloat16": "bf16",
    "__hip_bfloat16": "bf16",
    "nv_bfloat16": "bf16",
    "hip_bfloat16": "bf16",
    "bhalf_t": "bf16",
    "__bf16": "bf16",
    "e4m3": "f8E4M3FN",
    "e5m2": "f8E5M2",
    "float_e4m3_t": "f8E4M3FN",
    "float_e5m2_t": "f8E5M2",
    "__nv_fp8_e4m3": "f8E4M3FN",
    "__nv_fp8_e5m2": "f8E5M2",
    "__hip_fp8_e4m3_fnuz": "f8E4M3FNUZ",
    "__hip_fp8_e4m3": "f8E4M3FN",
    "float8_e4m3fnuz": "f8E4M3FNUZ",
    "float8_e4m3fn": "f8E4M3FN",
    "fp8_t": "f8E4M3FN",
    "fp8e4nv": "f8E4M3FN",
    "tfloat32_t": "tf32",
    "int8_t": "i8",
    "uint8_t": "ui8",
    "int32_t": "i32",
    "int64_t": "i64",
    "signed char": "i8",
    "unsigned char": "ui8",
    "unsigned short": "ui16",
    "unsigned int": "ui32",
    "unsigned long": "ui64",
    "long long": "i64",
    "unsigned long long": "ui64",
}
"""Spellings of kernels' names beside those that the hub knows, in lower case."""


@lru_cache(maxsize=4096)
def spelled_type(spelling: str) -> str:
    """The hub's name of an element type as some kernel spells it; empty where it is none."""
    plain = spelling.strip().lower()
    plain = plain.removesuffix(" const").removeprefix("const ").rstrip("*& ")
    known = _SPELLED.get(plain) or _SPELLED.get(plain.rpartition("::")[2])
    if known:
        return known
    found = find_dtype(plain) or find_dtype(plain.rpartition("::")[2])
    return "" if found is None or found.name in ("token", "opaque") else found.name


_OPAQUE = re.compile(r"OpaqueType<(\d{1,2})u?>")
_BY_WIDTH = {"1": "i8", "2": "bf16", "4": "f32", "8": "i64", "16": "complex<f64>"}
_TYPE_WORD = re.compile(
    r"(?<![\w:])(?:c10::|cutlass::|at::|phi::dtype::)?"
    r"(BFloat16|Half|Float8_e4m3fnu?z?|Float8_e5m2f?n?u?z?|bfloat16_t|half_t|float_e4m3_t|float_e5m2_t"
    r"|__nv_bfloat16|__hip_bfloat16|__half|_Float16|float|double|bf16|f16|half|complex<(?:float|double)>)(?![\w:])"
)
_WHOLE_NUMBER = re.compile(r"(?<![\w:])(unsigned char|signed char|long|int|bool|short|int8_t)(?![\w:])")


def element_type(text: str) -> str:
    """The first element type that a text of template arguments names: floating ones before whole numbers,
    which are as often sizes or indices.
    """
    found = _TYPE_WORD.search(text)
    if found is not None:
        return spelled_type(found[1])
    opaque = _OPAQUE.search(text)
    if opaque is not None:
        return _BY_WIDTH.get(opaque[1], "")
    whole = _WHOLE_NUMBER.search(text)
    return spelled_type(whole[1]) if whole is not None else ""


def first_element_type(name: KernelName) -> str:
    """The first element type among the template arguments of a name."""
    return element_type(", ".join(name.arguments)) if name.arguments else ""
