"""Rules of users: files of formulas, and plug-ins; errors give the position."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from math import isnan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.costs.aten import aten_cost, find_aten_rule, is_composite
from hespas.costs.aten.call import AtenCost, Call, read_call
from hespas.costs.aten.custom import VARIABLE, UserRule, forget_rules, read_rules
from hespas.costs.aten.formulas import FormulaError, parse_formula
from hespas.costs.operation import Cost
from hespas.graph import OpClass, dtype, plugins
from hespas.graph.errors import FormatError
from hespas.graph.plugins import collect_plugin_errors

BF16 = "c10::BFloat16"
PRODUCT = """
[[op]]
name = "mylib::gate_*"
class = "contraction"
product = ["1", "in0[0]", "in1[0]", "in0[-1]"]
bytes_written = "in0[0] * in1[0] * width(in0)"
"""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Files and plug-ins are read once a process."""
    forget_rules()
    yield
    forget_rules()


def rules(place: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = place / "costs.toml"
    path.write_text(text)
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def price(name: str, shapes: list[list[int]], values: list[str] | None = None) -> AtenCost:
    types = [BF16] * len(shapes)
    return aten_cost(name, json.dumps(shapes), json.dumps(types), values=json.dumps(values) if values else "")


def call(*shapes: list[int], values: list[str] | None = None) -> Call:
    return read_call(
        "x", json.dumps(shapes), json.dumps([BF16] * len(shapes)), values=json.dumps(values or [])
    )


def test_a_product_of_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_aten_rule("mylib::gate_up") is None
    rules(tmp_path, PRODUCT, monkeypatch)
    found = price("mylib::gate_up", [[8, 64], [32, 64]])
    assert found.cost.op_class is OpClass.CONTRACTION
    assert found.cost.flops == 2 * 8 * 32 * 64
    assert found.cost.bytes_read == 2 * (8 * 64 + 32 * 64)
    assert found.cost.bytes_written == 2 * 8 * 32
    assert found.cost.rate_dtype == dtype("bf16").code
    assert isnan(price("mylib::gate_up", [[8, 64]]).cost.flops), "there is no second argument"
    assert find_aten_rule("mylib::other") is None


def test_a_users_rule_answers_before_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[[op]]\nname = "aten::linear"\nflops = "1 + val1"\nbytes_written = 4\n'
    rules(tmp_path, text, monkeypatch)
    assert price("aten::linear", [[2, 2], []], ["", "6"]).cost.flops == 7
    assert not is_composite("aten::linear")
    rules(tmp_path, text + "composite = true\n", monkeypatch)
    forget_rules()
    assert is_composite("aten::linear")


def test_the_example_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "cost-rules.md").read_text("utf-8")
    text = guide.partition("# costs.toml\n")[2].partition("```")[0]
    rules(tmp_path, text, monkeypatch)
    assert price("mylib::gate_up", [[8, 64], [32, 64]]).cost.flops == 2 * 8 * 32 * 64
    found = price("mylib::scatter_rows", [[100, 4], [3], [3, 4]])
    assert (found.cost.flops, found.cost.bytes_read, found.cost.bytes_written) == (0, 2 * 15, 2 * 12)
    assert is_composite("mylib::scatter_rows")


def test_several_files_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "a.toml", tmp_path / "b.toml"]
    for number, path in enumerate(paths):
        path.write_text(f'[[op]]\nname = "x::*"\nflops = {number}\n')
    monkeypatch.setenv(VARIABLE, os.pathsep.join(map(str, paths)))
    assert price("x::y", [[1]]).cost.flops == 0


@pytest.mark.parametrize(
    ("pattern", "name", "answers"),
    [
        ("a::b", "a::b", True),
        ("a::b", "a::bc", False),
        ("a::*", "a::", True),
        ("*b*d", "abcd", True),
        ("*b*d", "abc", False),
        ("ab*ba", "aba", False),
        ("a*a*a", "a" * 1000, True),
        ("*x*x*x*", "y" * 1000, False),
    ],
)
def test_names_with_any_text_between(pattern: str, name: str, answers: bool) -> None:
    assert (
        UserRule(tuple(pattern.split("*")), lambda call: AtenCost(Cost(OpClass.CUSTOM)), False).answers(name)
        is answers
    )


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("nothing = 1", "top level"),
        ("op = 3", "top level"),
        ("[[op", "file"),
        ("[[op]]\nflops = 1", "[[op]] 1, name"),
        ('[[op]]\nname = "a"\nflop = "1"', "[[op]] 1, flop"),
        ('[[op]]\nname = "a"\n[[op]]\nname = "b"\nflops = "in0[0] * (2 + "', "[[op]] 2, flops, character 15"),
        ('[[op]]\nname = "a"\nflops = "in0 + 1"', "[[op]] 1, flops, character 5"),
        ('[[op]]\nname = "a"\nflops = "__import__(1)"', "[[op]] 1, flops, character 1"),
        ('[[op]]\nname = "a"\nflops = true', "[[op]] 1, flops"),
        ('[[op]]\nname = "a"\nclass = "gemm"', "[[op]] 1, class"),
        ('[[op]]\nname = "a"\nproduct = ["1", "2"]', "[[op]] 1, product"),
        ('[[op]]\nname = "a"\ncomposite = "yes"', "[[op]] 1, composite"),
        ("flops = " + "9" * 5000, "file"),
        ('[[op]]\nname = "a"\nflops = 0x' + "f" * 5000, "[[op]] 1, flops"),
        ('[[op]]\nname = "a"\nflops = -inf', "[[op]] 1, flops"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, text: str, position: str) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(text)
    with pytest.raises(FormatError) as caught:
        read_rules(path)
    assert caught.value.path == str(path)
    assert caught.value.position == position
    assert caught.value.hint


def test_more_files_than_are_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rules(tmp_path, PRODUCT, monkeypatch)
    monkeypatch.setenv(VARIABLE, os.pathsep.join([str(path)] * 65))
    with pytest.raises(FormatError, match="65 files of rules"):
        find_aten_rule("mylib::gate_up")


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.toml"))
    with pytest.raises(FormatError, match="cannot be read"):
        find_aten_rule("mylib::x")
    with pytest.raises(FormatError):
        read_rules(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3 - -1", 10),
        ("7 // 2 + 7 % 2 + 1 / 4", 4.25),
        ("in0[0] * in0[-1] + in1[1 - 1]", 4 * 6 + 8),
        ("elements(in0) + bytes(in1) + width(in0) + rank(in0)", 24 + 16 + 2 + 2),
        ("min(3, in0[0]) + max(1, 2) + ceil(5 / 2) + floor(2.5)", 3 + 2 + 3 + 2),
        ("sqrt(16) + log2(8)", 7),
        ("2e3 + 0.5", 2000.5),
        ("val2", 5),
    ],
)
def test_formulas(text: str, value: float) -> None:
    assert parse_formula(text)(call([4, 6], [8], [], values=["", "", "5"])) == value


@pytest.mark.parametrize("text", ["in9[0]", "in0[5]", "in0[0.5]", "val0", "bytes(in7)"])
def test_what_an_argument_does_not_have_is_unknown(text: str) -> None:
    assert isnan(parse_formula(text)(call([4, 6])))


@pytest.mark.parametrize(
    "text",
    ["", "1 +", "(1", "1)", "2 3", "a", "min(1)", "in0", "1 ** 2", "(" * 60 + "1", "1" * 2000, "$", "in0[0"],
)
def test_what_is_no_formula(text: str) -> None:
    with pytest.raises(FormulaError):
        parse_formula(text)


@given(st.text("in0[]()+-*/%, 123.elmtsbyvax", max_size=60))
def test_any_text_is_a_formula_or_is_refused(text: str) -> None:
    place = 0
    try:
        value = parse_formula(text)(call([2, 3]))
    except FormulaError as error:
        place, value = error.position, 0.0
    except (ArithmeticError, ValueError):
        value = 0.0
    assert 0 <= place <= len(text)
    assert isinstance(value, float)


@pytest.mark.parametrize(
    ("key", "formula", "fault"),
    [
        ("flops", "1 / 0", "division by zero"),
        ("bytes_written", "sqrt(0 - in0[0])", "math domain error"),
        ("bytes_read", "in0[0] - 10", "-6 is below 0"),
        ("transcendentals", "1e300 * 1e300", "inf is more than 1e\\+21"),
    ],
)
def test_a_formula_without_an_answer_is_told(
    key: str, formula: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(tmp_path, f'[[op]]\nname = "mylib::op"\n{key} = "{formula}"\n', monkeypatch)
    with collect_plugin_errors() as found:
        cost = price("mylib::op", [[4, 6]]).cost
    assert isnan(getattr(cost, key))
    (sentence,) = found.values()
    assert re.search(rf"\[\[op\]\] 1, {key}: no count for 'mylib::op'.*{fault}", sentence)


def test_extents_beyond_any_memory_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[[op]]\nname = "mylib::op"\nproduct = ["1", "1e20", "in0[0]", "in0[1]"]\n'
    rules(tmp_path, text, monkeypatch)
    with collect_plugin_errors() as found:
        assert isnan(price("mylib::op", [[4, 6]]).cost.flops)
    assert "1e+20 is more than" in next(iter(found.values()))


def one_flop(call: Call) -> AtenCost:
    return AtenCost(Cost(OpClass.CUSTOM, flops=1.0))


def fails(call: Call) -> AtenCost:
    raise RuntimeError("broken")


RULES = {"theirs::op": one_flop, "theirs::broken": fails}


def test_rules_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [("theirs", f"{__name__}:RULES"), ("absent", "no_such_module:RULES")]

    def registered(group: str) -> list[tuple[str, str]]:
        return entries if group == "hespas.costs" else []

    monkeypatch.setattr(plugins, "registered", registered)
    with collect_plugin_errors() as found:
        assert price("theirs::op", [[1]]).cost.flops == 1
        assert isnan(price("theirs::broken", [[1]]).cost.flops)
    assert {name for _, name in found} == {"theirs", "absent"}
    assert find_aten_rule("theirs::other") is None
