"""Operations outside a graph: the kinds, labels and sizes that measured, estimated and fitted operations
share.
"""

from __future__ import annotations

from hespas.operations.from_graph import (
    arithmetic_dtype,
    between_ranks,
    element_types_of,
    group_sizes,
    operations_of,
    single_products,
)
from hespas.operations.model import (
    CHANNELS,
    CLASS_OF_KIND,
    KIND_OF_CLASS,
    KINDS,
    MATRIX_CLASSES,
    MATRIX_KINDS,
    OF_LIBRARY,
    REORDERED,
    SCATTERED,
    SCHEMES,
    STRIDED,
    LabelColumn,
    Labels,
    Operations,
    Scheme,
    canonical_op,
    chosen,
    element_bytes,
    find_scheme,
    numbered,
    rows_by_label,
    timed_with_events,
)

__all__ = [
    "CHANNELS",
    "CLASS_OF_KIND",
    "KINDS",
    "KIND_OF_CLASS",
    "MATRIX_CLASSES",
    "MATRIX_KINDS",
    "OF_LIBRARY",
    "REORDERED",
    "SCATTERED",
    "SCHEMES",
    "STRIDED",
    "LabelColumn",
    "Labels",
    "Operations",
    "Scheme",
    "arithmetic_dtype",
    "between_ranks",
    "canonical_op",
    "chosen",
    "element_bytes",
    "element_types_of",
    "find_scheme",
    "group_sizes",
    "numbered",
    "operations_of",
    "rows_by_label",
    "single_products",
    "timed_with_events",
]
