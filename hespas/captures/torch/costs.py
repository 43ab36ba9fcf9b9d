"""What a recorded call costs: the rules of PyTorch's operations, asked with the shapes that were recorded."""

from __future__ import annotations

from functools import lru_cache
from math import isnan, nan

import msgspec

from hespas.captures.torch.calls import Argument, Call, TensorRecord
from hespas.captures.torch.talks import bytes_of
from hespas.costs.aten import VIEWS, aten_cost, find_aten_rule
from hespas.costs.operation import Cost
from hespas.graph import OpClass

__all__ = ["call_cost", "makes_nothing"]

_COPY_NAMES = """
    fsdp::all_gather_copy_in fsdp::split_with_sizes_copy fsdp::chunk_cat fsdp::copy_
    aten::split_with_sizes_copy aten::_chunk_cat aten::split_copy aten::stack aten::constant_pad_nd
    aten::flip aten::roll aten::tril aten::triu aten::select_scatter aten::slice_scatter
"""
_COPIES = frozenset(_COPY_NAMES.split())
"""Operations that move values as they are: read once, written once."""
_FILL_NAMES = """
    zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor eye
    randn randint rand randn_like rand_like randperm normal
"""
_FILLS = frozenset(f"aten::{name}" for name in _FILL_NAMES.split())
"""Operations that write values which they do not read."""
_FREE = frozenset({"aten::new_empty", "aten::new_empty_strided", "aten::set_", "aten::is_pinned"})


def makes_nothing(call: Call) -> bool:
    """Whether a call gives another view of memory, or memory without values: no node."""
    if call.talk is not None:
        return False
    return call.is_view or call.op in VIEWS or call.op in _FREE


def call_cost(call: Call) -> Cost:
    """The cost of one call, NaN where no rule knows it. Communication reads and writes what it sends and
    fills.
    """
    if call.talk is not None:
        sides = (call.talk.operand_bytes, call.talk.result_bytes)
        read, written = (0.0 if isnan(each) else each for each in sides)
        return Cost(OpClass.COLLECTIVE, 0.0, 0.0, 0.0, read, written)
    if call.op in _COPIES:
        moved = bytes_of(tuple(_tensors(call, wanted=call.reads)))
        return Cost(OpClass.MOVE, 0.0, 0.0, 0.0, moved, moved)
    if call.op in _FILLS:
        return Cost(OpClass.GENERATE, 0.0, 0.0, 0.0, 0.0, bytes_of(call.results))
    if find_aten_rule(call.op) is None:
        read = bytes_of(tuple(_tensors(call, wanted=call.reads)))
        return Cost(OpClass.UNKNOWN, nan, nan, nan, read, nan)
    return _rule_cost(call.op, *_texts(call.arguments))


def _tensors(call: Call, *, wanted: tuple[int, ...]) -> list[TensorRecord]:
    found: list[TensorRecord] = []
    for each in call.arguments:
        if isinstance(each, TensorRecord):
            found.append(each)
        elif not isinstance(each, str):
            found.extend(each)
    return [each for each in found if each.storage in wanted and each.storage not in call.writes]


@lru_cache(maxsize=1 << 14)
def _rule_cost(op: str, shapes: str, types: str, strides: str, values: str) -> Cost:
    return aten_cost(op, shapes, types, strides=strides, values=values).cost


def _texts(arguments: tuple[Argument, ...]) -> tuple[str, str, str, str]:
    """Shapes, types, strides and values, as the profiler writes them."""
    shapes: list[object] = []
    types: list[object] = []
    strides: list[object] = []
    values: list[str] = []
    for each in arguments:
        if isinstance(each, TensorRecord):
            entry: tuple[object, object, object, str] = (each.shape, each.dtype, each.strides, "")
        elif isinstance(each, str):
            entry = ((), "Scalar" if each else "", (), each)
        else:
            entry = (
                [tensor.shape for tensor in each],
                [tensor.dtype for tensor in each],
                [tensor.strides for tensor in each],
                "",
            )
        for column, value in zip((shapes, types, strides), entry[:3], strict=True):
            column.append(value)
        values.append(entry[3])
    shaped, typed, strided, valued = (
        msgspec.json.encode(each).decode() for each in (shapes, types, strides, values)
    )
    return shaped, typed, strided, valued
