"""What operation a node of another tool's trace is, as far as its words say: products run at another rate.

Only products, convolutions and attention are told, by the operation a node states or, where it states none,
by its name, and only where it counts FLOPs. STAGE writes letters, which are known by the schema of its files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.readiness import is_as_stated
from hespas.graph import NodeKind, OpClass, OpGraph
from hespas.graph.columns import FloatArray
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["SCHEMA_ATTRIBUTE", "STAGE_SCHEMA", "classes_unless_stated", "told_classes"]

SCHEMA_ATTRIBUTE = "schema"

STAGE_SCHEMA = "symbolic_tensor_network"
"""What the metadata of STAGE's files says of their schema."""

_STAGE: Mapping[str, OpClass] = {
    "M": OpClass.CONTRACTION,
    "A": OpClass.ELEMENTWISE,
    "E": OpClass.ELEMENTWISE,
    "E2": OpClass.ELEMENTWISE,
    "B": OpClass.REDUCTION,
    "SLICE": OpClass.SLICE,
}

_SEPARATE = re.compile(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z0-9]+")
_OTHERS = re.compile(
    r"softmax|norm|relu|gelu|silu|swiglu|rope|rotary|dropout|embed|residual|reduce|(?<!ein)sum|bias_?add|elementwise"
    r"|transpose|copy|cast|loss|optim|adam|sgd(?!emm)|update|memcpy|memset|splitk|reshape|permute"
)
_CLASSES: tuple[tuple[OpClass, re.Pattern[str]], ...] = (
    (OpClass.ATTENTION, re.compile(r"flash|sdpa|fmha|(?:^| )(?:attention|attn)(?: |$)|scaled dot product")),
    (OpClass.CONVOLUTION, re.compile(r"(?:^| )conv(?:olution)?[123]?d?(?: |$)|fprop|dgrad|wgrad")),
    (
        OpClass.CONTRACTION,
        re.compile(r"gemm|mat ?mul|nvjet|(?:^| )(?:mm|bmm|addmm|baddbmm|linear|einsum|dot|dense)(?: |$)"),
    ),
)


def _class_of(text: str) -> OpClass:
    words = " ".join(_SEPARATE.split(text)).lower()
    if _OTHERS.search(words.replace(" ", "")):
        return OpClass.UNKNOWN
    return next((op_class for op_class, found in _CLASSES if found.search(words)), OpClass.UNKNOWN)


def told_classes(
    default: NDArray[np.uint8],
    costs: tuple[NDArray[np.uint8], FloatArray],
    words: Callable[[list[int]], Iterable[str]],
    schema: str,
) -> NDArray[np.uint8]:
    """The classes, ``default`` where no word tells. ``costs``: each node's kind and FLOPs; ``words``: the
    operations or names of some nodes; ``schema``: what the file calls its own.
    """
    kind, flops = costs
    asked = np.flatnonzero((kind == NodeKind.COMPUTE) & (flops > 0) & (default == OpClass.UNKNOWN))
    if not len(asked):
        return default
    letters = _STAGE if schema == STAGE_SCHEMA else dict[str, OpClass]()
    known = dict[str, int]()
    found: list[int] = []
    for text in words(asked.tolist()):
        if text not in known:
            known[text] = int(letters.get(text) or _class_of(text))
        found.append(known[text])
    classes = default.copy()
    classes[asked] = found
    return classes


def classes_unless_stated(graph: OpGraph, default: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What a reader of the graph's trace takes the classes to be where no attribute states them."""
    if not is_as_stated(graph):
        return default
    strings, table = graph.strings, graph.extra

    def words(nodes: list[int]) -> Iterator[str]:
        for operation, name in zip(graph.op_row[nodes].tolist(), graph.name_row[nodes].tolist(), strict=True):
            yield strings[operation or name]

    kept = np.flatnonzero((table.node < 0) & (table.tag == AttributeField.STRING)).tolist()
    said = [table.value(row).decode() for row in kept if strings[int(table.key[row])] == SCHEMA_ATTRIBUTE]
    return told_classes(default, (graph.kind, graph.flops), words, said[0] if said else "")
