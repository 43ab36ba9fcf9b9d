"""The hub: the values everything travels in. It imports nothing else of this package."""

from __future__ import annotations

from hespas.graph.builder import GraphBuilder
from hespas.graph.columns import Csr, StringTable, StringTableBuilder
from hespas.graph.diagnostics import Diagnostic, Diagnostics, Severity
from hespas.graph.groups import ExplicitGroups, GroupSet, Permutation, StridedGroups, compress_groups
from hespas.graph.opgraph import (
    ACCUMULATOR_BITS,
    MAC_NOISE_SIGMA,
    NODE_COLUMNS,
    SOURCE_DTYPE,
    CollectiveKind,
    CollectiveTable,
    ContractionTable,
    ExtraTable,
    NodeKind,
    OpClass,
    OpGraph,
    P2pTable,
    RegionKind,
    RegionTable,
    Resource,
    timed_class_name,
)
from hespas.graph.profile import Estimate, EventColumns, HostOps, MeasuredComms, Profile, Timeline
from hespas.graph.tensors import (
    DTYPES,
    DYNAMIC,
    UNKNOWN_DTYPE,
    DType,
    DTypeKind,
    TensorTypes,
    TensorTypesBuilder,
    dtype,
    find_dtype,
)
from hespas.graph.workload import ABSENT, WHOLE_JOB, Workload

__all__ = [
    "ABSENT",
    "ACCUMULATOR_BITS",
    "DTYPES",
    "DYNAMIC",
    "MAC_NOISE_SIGMA",
    "NODE_COLUMNS",
    "SOURCE_DTYPE",
    "UNKNOWN_DTYPE",
    "WHOLE_JOB",
    "CollectiveKind",
    "CollectiveTable",
    "ContractionTable",
    "Csr",
    "DType",
    "DTypeKind",
    "Diagnostic",
    "Diagnostics",
    "Estimate",
    "EventColumns",
    "ExplicitGroups",
    "ExtraTable",
    "GraphBuilder",
    "GroupSet",
    "HostOps",
    "MeasuredComms",
    "NodeKind",
    "OpClass",
    "OpGraph",
    "P2pTable",
    "Permutation",
    "Profile",
    "RegionKind",
    "RegionTable",
    "Resource",
    "Severity",
    "StridedGroups",
    "StringTable",
    "StringTableBuilder",
    "TensorTypes",
    "TensorTypesBuilder",
    "Timeline",
    "Workload",
    "compress_groups",
    "dtype",
    "find_dtype",
    "timed_class_name",
]
