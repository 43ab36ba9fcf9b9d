"""The forms by name, and which one a kind of operation is fitted with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from hespas.estimators.calibrated.attention import DECODE, PREFILL
from hespas.estimators.calibrated.experts import EXPERTS
from hespas.estimators.calibrated.form import Form, Machine, Values
from hespas.estimators.calibrated.products import PRODUCTS
from hespas.estimators.calibrated.streams import ROOFLINE, STREAMS
from hespas.estimators.operations import Operations
from hespas.graph.columns import FloatArray

__all__ = ["CHIP_WIDE_KINDS", "FORMS", "FORMS_OF_KIND", "form_time_ns"]

FORMS: Mapping[str, Form] = MappingProxyType(
    {form.name: form for form in (ROOFLINE, STREAMS, PRODUCTS, PREFILL, DECODE, EXPERTS)}
)
"""Every form that a fit may name."""

FORMS_OF_KIND: Mapping[str, tuple[Form, ...]] = MappingProxyType(
    {
        "matmul": (PRODUCTS,),
        "convolution": (PRODUCTS,),
        "attention.context": (PREFILL,),
        "attention.encoder": (PREFILL,),
        "attention.generation": (DECODE,),
        "moe": (EXPERTS,),
        "vector": (STREAMS,),
        "reduction": (STREAMS,),
        "normalization": (STREAMS,),
        "quantize": (STREAMS,),
        "pooling": (STREAMS,),
        "gather": (STREAMS,),
        "move": (STREAMS,),
    }
)
"""Kind -> the forms that a fit chooses from by its error on held-out shapes."""

CHIP_WIDE_KINDS = frozenset(
    {"matmul", "convolution", "vector", "reduction", "normalization", "pooling", "gather", "move"}
)
"""Kinds that are one kernel, which a whole chip's roofline may speak of."""

_CHUNK = 2048


def form_time_ns(form: Form, values: Values, ops: Operations, machine: Machine) -> FloatArray:
    """The time of operations of one scheme [ns]; NaN where a size or a rate is unknown. O(ops), in chunks
    that stay in the processor's cache.
    """
    found = np.empty(len(ops))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for start in range(0, len(ops), _CHUNK):
            rows = np.arange(start, min(start + _CHUNK, len(ops)))
            part = ops if len(rows) == len(ops) else ops.take(rows)
            found[rows] = form.time_ns(values, form.columns(part, machine))
    return np.where(np.isfinite(found), found, np.nan)
