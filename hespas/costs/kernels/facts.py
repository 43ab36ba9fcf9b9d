"""Facts that the name of a kernel states (library, operation, element types, tile), and the patterns that
find them.
"""

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
    "KernelPattern",
    "KernelReader",
    "any_of",
    "cute_shapes",
    "element_type",
    "first_element_type",
    "spelled_type",
    "type_in_text",
    "widest_type",
]


class Cover(Enum):
    """Rule for how many of the result's elements a thread block of a launch computes. Bounds of the work
    follow from it.
    """

    UNKNOWN = "unknown"
    """Blocks may loop: their number does not bound the work."""
    AT_MOST = "at most"
    """A block computes at most the stated elements, and possibly none."""
    ONCE = "once"
    """One range in equal parts: all blocks except the last one are full."""
    ROWS = "rows"
    """A block computes one or more rows, whose lengths have bounds."""
    AT_LEAST = "at least"
    """A block computes one or more tiles of a matrix."""
    TILES = "tiles"
    """Tiles of a matrix along x and y, one matrix per z: all except the last row and column are full."""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Facts that the name of a kernel states. Facts that are not stated are the empty text, class UNKNOWN or
    the empty tuple.

    ``library`` is the library of the kernel (``hipBLASLt``), ``family`` the function in the library
    (``gemm``). ``dtype`` is the element type of operands, ``result_dtype`` of the result. ``tile`` is the
    part of the result that one block computes: (M, N, K) of a matmul, (queries, keys) of an attention.
    ``sizes`` are extents of the problem, for kernels that are generated for one problem.

    ``cover`` is the distribution of the result over thread blocks. A block computes at most ``per_block``
    elements plus ``per_thread`` for each thread, and a full block at least the ``_low`` figures (0: not
    stated). Each result element reads or writes one element of each of ``arrays`` arrays (0: unknown), of at
    most ``widest`` bytes.
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


KernelReader = Callable[[KernelFacts, KernelName, re.Match[str]], KernelFacts]
"""Function that adds facts of a name to the facts from the groups of its pattern."""


@dataclass(frozen=True, slots=True)
class KernelPattern:
    """Regular expression for kernel names, with the facts of the kernels that it matches. It is searched in
    the qualified name, or with ``whole`` in the whole text.

    The groups ``m``, ``n`` and ``k`` of the pattern are the tile, ``type`` and ``out`` the element types,
    ``layout`` the layout. Without a group ``type``, the first element type among the template arguments is
    used. ``read`` adds further facts. ``cover`` is the distribution of tiles over thread blocks.
    """

    pattern: str
    library: str
    family: str
    op_class: OpClass
    whole: bool = False
    read: KernelReader | None = None
    cover: Cover = Cover.UNKNOWN
    compiled: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        """Compile the pattern."""
        object.__setattr__(self, "compiled", re.compile(self.pattern))

    def facts(self, name: KernelName) -> KernelFacts | None:
        """Return the facts that a name states; None if the pattern does not match."""
        match = self.compiled.search(name.text if self.whole else name.qualified)
        if match is None:
            return None
        groups = {key: value for key, value in match.groupdict().items() if value}
        facts = KernelFacts(
            self.op_class,
            self.library,
            self.family,
            dtype=spelled_type(groups["type"]) if "type" in groups else first_element_type(name),
            tile=tuple(int(groups[key]) for key in ("m", "n", "k") if key in groups),
            result_dtype=spelled_type(groups.get("out", "")),
            layout=groups.get("layout", ""),
        )
        if self.cover is not Cover.UNKNOWN and len(facts.tile) > 1:
            facts = replace(facts, cover=self.cover, per_block=float(facts.tile[0] * facts.tile[1]))
        return facts if self.read is None else self.read(facts, name, match)


def any_of(words: str) -> str:
    """Return a regular expression that matches any of the space-separated ``words``, which are regular
    expressions, too.
    """
    return f"(?:{'|'.join(words.split())})"


def widest_type(text: str) -> float:
    """Return the bytes of the widest element type in a text, 0 without one."""
    words = {*_TYPE_WORD.findall(text), *_WHOLE_NUMBER.findall(text)}
    types = (find_dtype(spelled_type(word)) for word in words)
    return max((float(dtype.storage_bytes(1)) for dtype in types if dtype is not None), default=0.0)


_CUTE_EXTENT = r"(?:cute::)?(?:C|constant<int,) ?<?(?:\(int\))?(\d{1,5})>?"
_CUTE_SHAPE = re.compile(rf"tuple<{_CUTE_EXTENT}, ?{_CUTE_EXTENT}, ?{_CUTE_EXTENT} ?>")


def cute_shapes(text: str) -> list[tuple[int, int, int]]:
    """Return the CuTe shapes of three constants in a text, in order: ``tuple<C<128>, C<176>, C<64>>``."""
    return [(int(m), int(n), int(k)) for m, n, k in _CUTE_SHAPE.findall(text)]


def type_in_text(facts: KernelFacts, name: KernelName, match: re.Match[str]) -> KernelFacts:
    """Return the facts with the first element type in the whole name."""
    return replace(facts, dtype=element_type(name.text))


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
"""Spellings in kernel names that :func:`find_dtype` lacks, in lower case."""


@lru_cache(maxsize=4096)
def spelled_type(spelling: str) -> str:
    """Return the canonical name of an element type as spelled in kernel names; empty for other texts."""
    plain = spelling.strip().lower()
    plain = plain.removesuffix(" const").removeprefix("const ").rstrip("*& ")
    spelled = _SPELLED.get(plain) or _SPELLED.get(plain.rpartition("::")[2])
    if spelled:
        return spelled
    entry = find_dtype(plain) or find_dtype(plain.rpartition("::")[2])
    return "" if entry is None or entry.name in ("token", "opaque") else entry.name


_OPAQUE = re.compile(r"OpaqueType<(\d{1,2})u?>")
_BY_WIDTH = {"1": "i8", "2": "bf16", "4": "f32", "8": "i64", "16": "complex<f64>"}
_TYPE_WORD = re.compile(
    r"(?<![\w:])(?:c10::|cutlass::|at::|phi::dtype::)?"
    r"(BFloat16|Half|Float8_e4m3fnu?z?|Float8_e5m2f?n?u?z?|bfloat16_t|half_t|float_e4m3_t|float_e5m2_t"
    r"|__nv_bfloat16|__hip_bfloat16|__half|_Float16|float|double|bf16|f16|half|complex<(?:float|double)>)(?![\w:])"
)
_WHOLE_NUMBER = re.compile(r"(?<![\w:])(unsigned char|signed char|long|int|bool|short|int8_t)(?![\w:])")


def element_type(text: str) -> str:
    """Return the first element type in a text of template arguments.

    Floating-point types come first, because integer types are often types of sizes or indices.
    """
    match = _TYPE_WORD.search(text)
    if match is not None:
        return spelled_type(match[1])
    opaque = _OPAQUE.search(text)
    if opaque is not None:
        return _BY_WIDTH.get(opaque[1], "")
    whole = _WHOLE_NUMBER.search(text)
    return spelled_type(whole[1]) if whole is not None else ""


def first_element_type(name: KernelName) -> str:
    """Return the first element type among the template arguments of a name."""
    return element_type(", ".join(name.arguments)) if name.arguments else ""
