"""Recordings of a host: each cost counts once, on the operation that has it, at any call depth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from hespas.converters.measured_ops.costs import EventCosts, host_costs
from hespas.graph import Diagnostics, HostOps, OpClass, StringTableBuilder


class Op(NamedTuple):
    """An operation of float tensors, called by the one in row ``parent``."""

    name: str
    parent: int = -1
    shapes: Sequence[object] = ()
    values: Sequence[str] = ()


def costs_of(
    *ops: Op, communicates: Sequence[int] = (), touches: Sequence[bool] | None = None
) -> tuple[EventCosts, Diagnostics]:
    strings = StringTableBuilder()
    types = [json.dumps(["float"] * len(op.shapes)) if op.shapes else "" for op in ops]
    shapes = [json.dumps(op.shapes) if op.shapes else "" for op in ops]
    nothing, unknown = np.zeros(len(ops), np.int32), np.full(len(ops), np.nan)

    def rows(texts: Sequence[str]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array([strings.add(text) for text in texts], np.int32)

    host = HostOps(
        name_id=rows([op.name for op in ops]),
        thread_id=nothing,
        parent=np.array([op.parent for op in ops], np.int32),
        start_ns=unknown,
        duration_ns=unknown,
        sequence=nothing.astype(np.int64),
        shapes_id=rows(shapes),
        dtype_id=rows(types),
        strides_id=nothing,
        values_id=rows([json.dumps(op.values) if op.values else "" for op in ops]),
    )
    talks = np.isin(np.arange(len(ops)), communicates)
    diagnostics = Diagnostics()
    seen = None if touches is None else np.array(touches, np.bool_)
    found = host_costs(host, strings.build(), diagnostics, "trace", communicates=talks, touches=seen)
    return found, diagnostics


PRODUCT = [[8], [8, 4], [4, 8]]
FLOPS = 2 * 8 * 8 * 4 + 8 * 8


def test_a_product_is_counted_once_though_four_operations_stand_for_it() -> None:
    found, diagnostics = costs_of(
        Op("aten::linear", -1, [[8, 4], [8, 4], [8]]),
        Op("aten::t", 0, [[8, 4]]),
        Op("aten::addmm", 0, PRODUCT),
        Op("aten::copy_", 2, [[8, 8], [8]]),
    )
    assert found.flops.tolist() == [0, 0, FLOPS, 0]
    assert found.bytes_read.tolist() == [0, 0, 4 * (8 + 8 * 4 + 4 * 8), 0]
    assert found.bytes_written.tolist() == [0, 0, 4 * 64, 0]
    assert [OpClass(code).name for code in found.op_class] == ["FREE", "FREE", "CONTRACTION", "FREE"]
    table = found.contractions
    assert [(table.node[0], table.m[0], table.n[0], table.k[0])] == [(2, 8, 8, 4)]
    assert len(table) == 1
    assert found.operands.lengths.tolist() == [0, 0, 3, 0]
    assert diagnostics.counts() == {"measured-ops.calls": 3}


def test_an_operation_of_parts_bears_the_cost_where_no_part_does() -> None:
    found, _ = costs_of(
        Op("aten::linear", -1, [[8, 4], [8, 4]]), Op("mkldnn::private", 0), Op("aten::empty", 1)
    )
    assert found.flops.tolist() == [2 * 8 * 8 * 4, 0, 0]


def test_equal_operations_cost_alike_and_each_for_itself() -> None:
    found, _ = costs_of(*[Op("aten::mm", -1, [[2, 3], [3, 5]])] * 3, Op("aten::mm", -1, [[2, 3], [3, 7]]))
    assert found.flops.tolist() == [60, 60, 60, 84]
    assert found.contractions.node.tolist() == [0, 1, 2, 3]
    assert found.contractions.n.tolist() == [5, 5, 5, 7]


def test_what_nobody_knows_is_unknown_and_named() -> None:
    found, diagnostics = costs_of(
        Op("my::op", -1, [[4]]),
        Op("aten::empty", 0, []),
        Op("aten::mm"),
        Op("aten::add", -1, [[4], [4]]),
        Op("my::wrapper"),
        Op("aten::relu", 4, [[4]]),
    )
    assert np.isnan(found.flops).tolist() == [True, False, True, False, False, False]
    assert found.flops[3:].tolist() == [4, 0, 4]
    told = {each.code: each.message for each in diagnostics}
    assert "my::op 1 x" in told["measured-ops.unknown-op"]
    assert "aten::mm" not in told["measured-ops.unknown-op"]  # the table has it, the trace lacks its shapes
    assert "wrapper" not in told["measured-ops.unknown-op"]
    assert "record_shapes" in told["measured-ops.inputs-not-recorded"]
    assert "aten::mm 1 x" in told["measured-ops.inputs-not-recorded"]


@pytest.mark.parametrize("name", ["aten::to", "aten::contiguous", "aten::dropout"])
def test_what_copies_only_where_it_must_did_nothing_without_a_copy(name: str) -> None:
    found, _ = costs_of(Op(name, -1, [[4]]), Op(name, -1, [[4]]), Op("aten::copy_", 1, [[4], [4]]))
    assert found.bytes_written.tolist() == [0, 0, 16]


def test_nothing_is_known_of_communication_and_nothing_done_around_it() -> None:
    found, _ = costs_of(
        Op("c10d::allreduce_"), Op("record_param_comms", 0), Op("inner", 1), Op("other"), communicates=[1]
    )
    assert np.isnan(found.flops).tolist() == [False, True, False, True]


def test_what_touches_no_tensor_does_nothing() -> None:
    found, diagnostics = costs_of(Op("Optimizer.step#SGD.step"), Op("my::op"), touches=[False, True])
    assert np.isnan(found.flops).tolist() == [False, True]
    assert diagnostics.counts()["measured-ops.unknown-op"] == 1


def test_calls_nested_beyond_reason_take_no_recursion() -> None:
    deep = 20_000
    ops = [Op("aten::linear", each - 1, [[2, 2], [2, 2]]) for each in range(deep)]
    found, _ = costs_of(*ops, Op("aten::mm", deep - 1, [[2, 2], [2, 2]]))
    assert found.flops[:-1].sum() == 0
    assert found.flops[-1] == 16
    found, _ = costs_of(*ops)
    assert np.flatnonzero(found.flops).tolist() == [deep - 1]


def test_a_trace_of_no_operations() -> None:
    found, diagnostics = costs_of()
    assert len(found.flops) == 0
    assert not len(diagnostics)


def test_the_order_of_images_is_reported_as_assumed() -> None:
    values = ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "1"]
    image = Op("aten::conv2d", -1, [[8, 3, 16, 16], [4, 3, 3, 3], *[[]] * 5], values)
    _, diagnostics = costs_of(image, Op("aten::relu", -1, [[8, 4, 14, 14]]))
    assert diagnostics.counts().get("measured-ops.assumed-layout") == 1
