"""Composite: the first estimator that covers an operation answers, and is reported."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from hespas.estimators import composite as composite_model
from hespas.estimators import load_estimator
from hespas.estimators.composite import Composite, read_order
from hespas.estimators.interface import Estimator, Prediction, estimate_by_operation
from hespas.estimators.roofline import Roofline
from hespas.graph import (
    DTYPES,
    CollectiveKind,
    Diagnostics,
    Estimate,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    StridedGroups,
)
from hespas.graph.errors import FormatError, UsageError
from hespas.hardware import Device, load_device
from hespas.operations import Labels, Operations, build

H100 = load_device("H100-SXM")
BF16 = next(entry for entry in DTYPES if entry.name == "bf16")
F32 = next(entry for entry in DTYPES if entry.name == "f32")
ASKED: list[tuple[str, int]] = []
"""Name and number of operations of every question to a stub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stub:
    """An estimator that covers one kind with a constant time."""

    title: str = "stub"
    kind: str = "vector"
    time_ns: float = 1.0

    @property
    def name(self) -> str:
        return self.title

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        return estimate_by_operation(self, graph, device, diagnostics)

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        ASKED.append((self.name, len(ops)))
        covers = np.isin(np.arange(len(ops)), ops.kind.where(self.kind))
        if diagnostics is not None:
            diagnostics.warning("stub.not-covered", device.name, "not mine", count=int((~covers).sum()))
        return Prediction.of(self.name, np.where(covers, self.time_ns, np.nan))


STUBS: dict[str, Estimator] = {
    "a": Stub(title="a", kind="vector", time_ns=10.0),
    "b": Stub(title="b", kind="vector", time_ns=20.0),
    "c": Stub(title="c", kind="matmul", time_ns=30.0),
    "roofline": Roofline(),
}


@pytest.fixture(autouse=True)
def _stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    ASKED.clear()
    monkeypatch.setattr(composite_model, "load_estimator", STUBS.__getitem__)


def program(copies: int = 3) -> OpGraph:
    """Additions of one size, a product, an all-reduce, a permutation and a parameter."""
    b = GraphBuilder("small")
    tensor = b.types.add(BF16, (64, 64))
    add, dot = b.strings.add("add"), b.strings.add("dot")

    def node(op: int, op_class: OpClass, kind: NodeKind = NodeKind.COMPUTE, flops: float = 4096.0) -> int:
        size = float(b.types.bytes_of(tensor)) if flops else 0.0
        return b.add_node(
            name_id=op,
            op_id=op,
            op_class=op_class,
            kind=kind,
            operands=[tensor, tensor],
            results=[tensor],
            flops=flops,
            transcendentals=0.0,
            bytes_read=2 * size,
            bytes_written=size,
        )

    for _ in range(copies):
        node(add, OpClass.ELEMENTWISE)
    product = node(dot, OpClass.CONTRACTION, flops=2.0 * 64**3)
    b.add_contraction(
        product,
        batch=1,
        m=64,
        n=64,
        k=64,
        flops=2.0 * 64**3,
        useful_flops=2.0 * 64**3,
        lhs=BF16.code,
        rhs=BF16.code,
        accumulator=F32.code,
    )
    reduce = node(b.strings.add("all-reduce"), OpClass.COLLECTIVE, NodeKind.COLLECTIVE)
    b.add_collective(
        reduce, CollectiveKind.ALL_REDUCE, group_set=b.group_set(StridedGroups.all_ranks(8)), comm_bytes=8192
    )
    swap = node(b.strings.add("collective-permute"), OpClass.P2P, NodeKind.PERMUTE)
    b.add_p2p(swap, permutation=b.permutation(Permutation.from_pairs([(0, 1), (1, 0)], 2)), comm_bytes=8192)
    node(b.strings.add("parameter"), OpClass.FREE, flops=0.0)
    return b.build()


def said(estimated: Estimate) -> Counter[str]:
    numbers: list[int] = estimated.estimator[estimated.duration_ns != 0].tolist()
    return Counter(estimated.estimators[number] if number >= 0 else "nobody" for number in numbers)


def test_the_first_that_covers_speaks_and_each_node_knows() -> None:
    estimated = Composite(order="a+b+c").estimate(program(), H100)
    assert said(estimated) == {"a": 3, "c": 1, "nobody": 2}
    assert sorted(estimated.duration_ns[~np.isnan(estimated.duration_ns)].tolist()) == [0, 10, 10, 10, 30]
    turned = Composite(order="b+a+c").estimate(program(), H100)
    assert said(turned) == {"b": 3, "c": 1, "nobody": 2}


def test_equal_operations_are_asked_once_and_only_what_is_open() -> None:
    Composite(order="a+c").estimate(program(copies=1000), H100)
    assert ASKED == [("a", 4), ("c", 3)]


def test_the_roofline_fills_what_operations_do_not_show() -> None:
    graph = program()
    estimated = Composite(order="a+c+roofline").estimate(graph, H100)
    assert said(estimated) == {"a": 3, "c": 1, "roofline": 2}
    alone = Roofline().estimate(graph, H100)
    network = estimated.estimator == 2
    assert estimated.duration_ns[network].tolist() == alone.duration_ns[network].tolist()
    bounds: list[int] = estimated.bound[network].tolist()
    assert [estimated.bounds[number] for number in bounds] == ["network", "network"]
    assert estimated.coverage == 1.0


def test_a_roofline_before_others_keeps_its_word() -> None:
    estimated = Composite(order="roofline+a+c").estimate(program(), H100)
    assert said(estimated) == {"roofline": 6}


def test_what_one_lacks_is_no_warning_while_another_has_it() -> None:
    diagnostics = Diagnostics()
    Composite(order="a+c+roofline").estimate(program(), H100, diagnostics)
    assert {finding.severity.value for finding in diagnostics if finding.code == "stub.not-covered"} == {
        "info"
    }
    assert "composite.not-covered" not in diagnostics.counts()


def test_what_was_assumed_of_an_answer_stays_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collective is said by fits of a sibling, whoever comes after."""
    monkeypatch.setitem(STUBS, "collectives", load_estimator("collectives"))
    diagnostics = Diagnostics()
    estimated = Composite(order="collectives+roofline").estimate(program(), load_device("GB200"), diagnostics)
    assert said(estimated)["collectives"] >= 1
    told = {finding.code: finding.severity.value for finding in diagnostics}
    assert told["collectives.kin"] == "warning"
    assert told["collectives.no-collective"] == "info"


def test_what_nobody_has_is_a_warning_with_its_number() -> None:
    diagnostics = Diagnostics()
    Composite(order="a+c").estimate(program(), H100, diagnostics)
    assert diagnostics.counts()["composite.not-covered"] == 2


def test_operations_of_a_table_are_told_by_whom_too() -> None:
    ones = np.full(2, 64.0)
    ops = build.matmuls(Labels.constant("bf16", 2), batch=np.ones(2), m=ones, n=ones, k=ones)
    answer = Composite(order="a+c").predict(ops, H100)
    assert answer.models == ("a", "c")
    assert answer.estimator.tolist() == [1, 1]
    assert answer.duration_ns.tolist() == [30.0, 30.0]


def test_a_file_orders_kinds_by_themselves(tmp_path: Path) -> None:
    path = tmp_path / "order.toml"
    path.write_text('order = ["c", "roofline"]\n[kinds]\nvector = ["b", "a"]\n')
    estimated = Composite(path=str(path)).estimate(program(), H100)
    assert said(estimated) == {"b": 3, "c": 1, "roofline": 2}
    assert ASKED == [("b", 1), ("c", 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("order = [", "not TOML"),
        ('colour = "red"', "unknown key 'colour'"),
        ("[kinds]", "expected a list"),
        ('order = ["a", 1]', "expected a list"),
        ('order = ["a", "a"]', "twice"),
        ('order = ["a"]\nkinds = 3', "expected a table"),
        ('order = ["a"]\n[kinds]\ngemm = ["a"]', "no such kind"),
        ('order = ["composite"]', "itself"),
        ("order = " + "[" * 5000, "too deeply"),
        ("a" + ".a" * 100 + " = 1", "too deeply"),
        ("order = " + "9" * 5000, "not TOML"),
        ("#" * (2 << 20), "more than the limit of 1,048,576"),
    ],
)
def test_a_wrong_file_is_told_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "order.toml"
    path.write_text(text)
    with pytest.raises(FormatError, match=message):
        read_order(str(path))
    with pytest.raises(FormatError, match="cannot be read"):
        read_order(str(tmp_path / "none.toml"))


@pytest.mark.parametrize("order", ["+", "a++b", "a+a", "composite:order=a"])
def test_a_wrong_order_is_a_usage_error(order: str) -> None:
    with pytest.raises(UsageError):
        Composite(order=order)


def test_an_order_and_a_file_exclude_each_other() -> None:
    with pytest.raises(UsageError):
        Composite(order="a", path="b.toml")


def test_two_of_one_name_are_told_apart() -> None:
    STUBS["a:time_ns=5"] = replace(STUBS["a"], time_ns=5.0)  # type: ignore[type-var]
    answer = Composite(order="a:time_ns=5+a").estimate(program(), H100)
    assert answer.estimators == ("a:time_ns=5", "a")


def test_the_default_order_covers_a_whole_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composite_model, "load_estimator", load_estimator)
    model = load_estimator("composite")
    assert isinstance(model, Composite)
    estimated = model.estimate(program(), H100)
    assert estimated.coverage == 1.0
    assert said(estimated)["collectives"] == 2, "the all-reduce and the message"
