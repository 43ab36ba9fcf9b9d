"""Drawings: golden DOT, GraphML that a parser reads, hostile names as text, reported limits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas import api
from hespas.converters.drawing import FORMAT_DOT, FORMAT_GRAPHML
from hespas.converters.drawing.picture import MAX_NODES, fill_of
from hespas.converters.format import WriteOptions
from hespas.graph import Diagnostics, GraphBuilder, NodeKind, OpClass, OpGraph, RegionKind, Workload
from hespas.graph.errors import UnsupportedError
from tests.limits import SAFETY_S

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent
NAMESPACE = "{http://graphml.graphdrawing.org/xmlns}"


def one_node(name: str, operation: str = "op", nodes: int = 1) -> OpGraph:
    b = GraphBuilder(name)
    for number in range(nodes):
        b.add_node(
            name_id=b.strings.add(name),
            op_id=b.strings.add(operation),
            op_class=OpClass.ELEMENTWISE,
            kind=NodeKind.COMPUTE,
            data_deps=[number - 1] if number else [],
            flops=1.0,
            transcendentals=0.0,
            bytes_read=1.0,
            bytes_written=1.0,
        )
    return b.build()


def dot(
    workload: Workload,
    path: Path,
    options: WriteOptions | None = None,
    diagnostics: Diagnostics | None = None,
) -> str:
    assert FORMAT_DOT.write is not None
    found = diagnostics if diagnostics is not None else Diagnostics()
    FORMAT_DOT.write(workload, path, options or WriteOptions(), found)
    return path.read_text("utf-8")


@pytest.mark.parametrize("program", ["scan_nested", "pipeline_ring"])
def test_drawings_are_the_golden_ones(program: str, tmp_path: Path) -> None:
    source = ROOT / "fixtures" / "stablehlo" / f"{program}.mlir"
    api.convert(source, tmp_path / "out.dot")
    assert (tmp_path / "out.dot").read_text("utf-8") == (GOLDEN / f"{program}.dot").read_text("utf-8")


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize("name", ['a"b', "a\\", "<b>x</b>", "a\nb", "a\x00b", "\ud800", "}; x -> y; {"])
def test_graphviz_takes_hostile_names_for_text(name: str, tmp_path: Path) -> None:
    text = dot(Workload.spmd(one_node(name), 1), tmp_path / "x.dot")
    done = subprocess.run(
        ["dot", "-Tplain"], input=text.encode(), capture_output=True, check=False, timeout=SAFETY_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().count("\nnode ") == 1


@given(st.text(max_size=20))
def test_names_never_leave_their_quotes(name: str) -> None:
    from hespas.converters.drawing.picture import quoted

    text = quoted(name)
    assert text.startswith('"')
    assert text.endswith('"')
    inner = text[1:-1].replace("\\\\", "").replace('\\"', "")
    assert '"' not in inner
    assert "\\" not in inner
    assert "\n" not in text


@given(name=st.text(max_size=20), operation=st.text(max_size=20))
def test_graphml_is_xml_whatever_the_names(
    name: str, operation: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("x") / "x.graphml"
    assert FORMAT_GRAPHML.write is not None
    FORMAT_GRAPHML.write(Workload.spmd(one_node(name, operation), 2), path, WriteOptions(), Diagnostics())
    tree = ElementTree.parse(path)
    assert len(tree.findall(f".//{NAMESPACE}node")) == 1


def test_graphml_holds_the_columns_and_edges_of_every_node(tmp_path: Path) -> None:
    source = ROOT / "fixtures" / "stablehlo" / "moe_all_to_all.mlir"
    api.convert(source, tmp_path / "out.graphml")
    workload = api.read(source)
    assert isinstance(workload, Workload)
    graph = workload.classes[0]
    tree = ElementTree.parse(tmp_path / "out.graphml")
    nodes = tree.findall(f".//{NAMESPACE}node")
    data = [{each.get("key"): each.text for each in node} for node in nodes]
    assert [each["op"] for each in data] == [graph.op_name(node) for node in range(len(graph))]
    flops = [float(each.get("flops") or "nan") for each in data]
    assert np.array_equal(flops, graph.flops, equal_nan=True)
    assert sum("collective" in each for each in data) == len(graph.collectives)
    kinds = [edge[0].text for edge in tree.findall(f".//{NAMESPACE}edge")]
    assert kinds.count("data") == len(graph.data_deps.values)
    assert kinds.count("control") == len(graph.control_deps.values)


def test_too_much_to_draw_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="too many to draw") as caught:
        dot(Workload.spmd(one_node("n", nodes=MAX_NODES + 1), 1), tmp_path / "x.dot")
    assert "`granularity=region`" in str(caught.value.hint)
    assert not (tmp_path / "x.dot").exists()


def test_what_dot_takes_minutes_for_says_what_to_lay_it_out_with(tmp_path: Path) -> None:
    found = Diagnostics()
    few, many = (Workload.spmd(one_node("n", nodes=count), 1) for count in (1_500, 1_501))
    dot(few, tmp_path / "few.dot", diagnostics=found)
    assert "drawing.layout" not in found.counts()
    dot(many, tmp_path / "many.dot", diagnostics=found)
    assert "sfdp" in next(each.message for each in found if each.code == "drawing.layout")


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_lays_out_a_training_step(tmp_path: Path) -> None:
    """Without bounds on its search it takes minutes; with them 2 to 3 s of CPU time."""
    api.convert(ROOT / "fixtures" / "stablehlo" / "llama_train_1dev.mlir.gz", tmp_path / "step.dot")
    limited = ["sh", "-c", "ulimit -t 40; exec dot -Tplain step.dot"]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, check=False, timeout=SAFETY_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\nnode ") > 300


def test_only_the_classes_of_chosen_ranks_are_drawn(tmp_path: Path) -> None:
    ranks = np.array([0, 0, 1], np.int32)
    workload = Workload(name="job", classes=(one_node("first"), one_node("second")), rank_class=ranks)
    both = dot(workload, tmp_path / "both.dot")
    assert "first (2 ranks, 0 to 1)" in both
    assert "second (rank 2)" in both
    one = dot(workload, tmp_path / "one.dot", WriteOptions(ranks=range(2, 3)))
    assert "first" not in one


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("op_class", list(OpClass))
def test_ink_can_be_read_on_its_fill(op_class: OpClass) -> None:
    light, dark = sorted(map(_luminance, fill_of(op_class)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2.1, level AA


def test_entities_in_names_are_text(tmp_path: Path) -> None:
    text = dot(Workload.spmd(one_node("a&lt;b", "x&y"), 1), tmp_path / "x.dot")
    assert "a&amp;lt;b" in text
    assert "x&amp;y" in text


def test_regions_nested_too_deeply_have_no_outline(tmp_path: Path) -> None:
    b = GraphBuilder("deep")
    region = -1
    for number in range(100):
        region = b.add_region(RegionKind.CALL, parent=region, label=f"r{number}")
        b.add_node(
            name_id=b.strings.add(f"n{number}"),
            op_id=b.strings.add("op"),
            op_class=OpClass.ELEMENTWISE,
            kind=NodeKind.COMPUTE,
            region=region,
        )
    found = Diagnostics()
    assert FORMAT_DOT.write is not None
    FORMAT_DOT.write(Workload.spmd(b.build(), 1), tmp_path / "x.dot", WriteOptions(), found)
    text = (tmp_path / "x.dot").read_text()
    assert text.count("subgraph cluster") == 1 + 32
    assert all(f'label="op\\nn{number}' in text for number in range(100))
    assert text.count("{") == text.count("}")
    assert found.counts()["drawing.depth"] == 68
