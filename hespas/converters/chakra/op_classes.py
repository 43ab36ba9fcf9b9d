"""Operation classes of nodes of another tool's trace, derived from operation and node names.

Matmuls run at another rate than other computations. Only matmuls, convolutions and attention are
recognized, by the operation that a node states or, without one, by its name, and only for nodes that count
FLOPs. STAGE writes single letters, which the schema attribute of its files identifies.
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

__all__ = ["SCHEMA_ATTRIBUTE", "classes_by_name", "classes_unless_stated"]

SCHEMA_ATTRIBUTE = "schema"
"""Metadata attribute with the name of a file's schema."""

_STAGE_SCHEMA = "symbolic_tensor_network"
"""Schema name in the metadata of STAGE's files."""

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


def classes_by_name(
    default: NDArray[np.uint8],
    costs: tuple[NDArray[np.uint8], FloatArray],
    words: Callable[[list[int]], Iterable[str]],
    schema: str,
) -> NDArray[np.uint8]:
    """Return the operation class of each node, found from its name if ``default`` is unknown. Only
    computations with FLOPs get a class from their names. ``costs`` are the kind and the FLOPs of each node.
    ``words`` returns the operations or names of the given nodes. ``schema`` is the schema name in the file.
    """
    kind, flops = costs
    unclassed = np.flatnonzero((kind == NodeKind.COMPUTE) & (flops > 0) & (default == OpClass.UNKNOWN))
    if not len(unclassed):
        return default
    letters = _STAGE if schema == _STAGE_SCHEMA else dict[str, OpClass]()
    classes_of_text = dict[str, int]()
    new_classes: list[int] = []
    for text in words(unclassed.tolist()):
        if text not in classes_of_text:
            spaced = " ".join(_SEPARATE.split(text)).lower()
            is_other = _OTHERS.search(spaced.replace(" ", "")) is not None
            matching = (op_class for op_class, pattern in _CLASSES if not is_other and pattern.search(spaced))
            classes_of_text[text] = int(letters.get(text) or next(matching, OpClass.UNKNOWN))
        new_classes.append(classes_of_text[text])
    classes = default.copy()
    classes[unclassed] = new_classes
    return classes


def classes_unless_stated(graph: OpGraph, default: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the operation classes that a reader of the written trace derives from names, for nodes without a
    class attribute.
    """
    if not is_as_stated(graph):
        return default
    strings, table = graph.strings, graph.extra

    def words(nodes: list[int]) -> Iterator[str]:
        for operation, name in zip(graph.op_id[nodes].tolist(), graph.name_id[nodes].tolist(), strict=True):
            yield strings[operation or name]

    schema_rows = np.flatnonzero((table.node < 0) & (table.tag == AttributeField.STRING)).tolist()
    schemas = [
        table.value(row).decode() for row in schema_rows if strings[int(table.key[row])] == SCHEMA_ATTRIBUTE
    ]
    return classes_by_name(default, (graph.kind, graph.flops), words, schemas[0] if schemas else "")
