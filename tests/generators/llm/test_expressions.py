"""Sizes as expressions: exact, evaluated when all values are known, and rejected with the reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.generators.llm.model_file import ExpressionError, evaluate_sizes


def value(text: str, **sizes: int | str) -> int:
    stated: dict[str, int | str] = {"x": text, **sizes}
    return evaluate_sizes(stated)["x"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4 * hidden", 16384),
        ("round_up(8 * hidden / 3, 256)", 11008),
        ("max(min(1, 2), 3) * 2", 6),
        ("(1 + 2) * 3 - 4", 5),
        ("2 - 1 - 1", 0),
        ("12 / 3 / 2", 2),
        ("10 / 4 * 2", 5),
        ("7 // 2 + 7 % 4", 6),
        ("1 + 2 * 3", 7),
        ("round_up(5, 5)", 5),
        (" hidden ", 4096),
    ],
)
def test_expressions_are_exact(text: str, expected: int) -> None:
    assert value(text, hidden=4096) == expected


def test_order_does_not_matter() -> None:
    sizes: dict[str, int | str] = {"c": "b + 1", "b": "a * 2", "a": 3}
    assert evaluate_sizes(sizes) == {"a": 3, "b": 6, "c": 7}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "the expression is incomplete"),
        ("  ", "the expression is incomplete"),
        ("1 2", "unexpected '2'"),
        ("1 +", "the expression is incomplete"),
        ("* 1", "unexpected '\\*'"),
        ("2 ** 3", "unexpected '\\*'"),
        ("-1", "-1 is not a whole number"),
        ("(1", "the expression is incomplete: '\\)' is expected"),
        ("1)", "unexpected '\\)'"),
        ("1, 2", "unexpected ','"),
        ("(1, 2)", "unexpected ','"),
        ("()", "unexpected '\\)'"),
        ("max(1)", "max takes 2 values"),
        ("max(1, 2, 3)", "max takes 2 values"),
        ("max((1, 2), 3)", "unexpected ','"),
        ("max", "the expression is incomplete"),
        ("max 1", "unexpected '1'"),
        ("(max)(1, 2)", "unexpected '\\)'"),
        ("hiden", "unknown size 'hiden'; did you mean 'hidden'\\?"),
        ("__import__", "unknown size '__import__'$"),
        ("hidden.real", "unexpected '\\.' in the expression 'hidden.real'"),
        ("1e", "unexpected 'e'"),
        ("hidden / 3", "1365.33 is not a whole number"),
        ("1 - 2", "-1 is not a whole number"),
        ("1 / (2 - 2)", "division by 0"),
        ("1 // 0", "division by 0"),
        ("1 % 0", "division by 0"),
        ("round_up(1, 0)", "division by 0"),
        ("9" * 30, "beyond 2\\*\\*62"),
        ("1 +" * 200 + "1", "more than 500 characters"),
        ("٣", "in the expression"),
    ],
)
def test_what_is_no_expression_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(ExpressionError, match=f"^x: .*(?:{wrong})"):
        value(text, hidden=4096)


def test_sizes_that_need_each_other_are_named_and_others_not() -> None:
    with pytest.raises(ExpressionError, match=r"^b: b and c depend on each other$"):
        evaluate_sizes({"a": "b", "b": "c + 1", "c": "b"})
    with pytest.raises(ExpressionError, match=r"^x: x depend on each other$"):
        evaluate_sizes({"x": "x"})


def test_a_whole_number_has_bounds_too() -> None:
    with pytest.raises(ExpressionError, match=r"^x: -1 is not"):
        evaluate_sizes({"x": -1})
    with pytest.raises(ExpressionError, match=r"^y: beyond"):
        evaluate_sizes({"x": 2**62, "y": "x * x"})


def test_brackets_nest_to_a_limit() -> None:
    assert value("(" * 49 + "1" + ")" * 49) == 1
    with pytest.raises(ExpressionError, match="nest deeper than 50"):
        value("(" * 50 + "1" + ")" * 50)


def test_numbers_with_a_fraction_are_exact() -> None:
    assert value("2.5 * hidden + 1e3 - -1", hidden=4096) == 11241


_Known = tuple[str, int]


def _joined(parts: tuple[_Known, str, _Known]) -> _Known:
    (left, a), sign, (right, b) = parts
    return f"({left} {sign} {right})", {"+": a + b, "-": a - b, "*": a * b}[sign]


_TREES = st.recursive(
    st.integers(0, 50).map(lambda each: (str(each), each)),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(_joined),
    max_leaves=8,
)


@given(_TREES)
def test_random_expressions_have_their_value(tree: _Known) -> None:
    text, expected = tree
    if 0 <= expected <= 2**62:
        assert value(text) == expected
        assert value(f"({text} + 3) / 4 * 4") == expected + 3
    else:
        with pytest.raises(ExpressionError, match="is not a whole number"):
            value(text)


@given(st.text(alphabet="0123456789+-*/%(), xmaround_up", max_size=40))
def test_any_text_gives_a_value_or_an_error_that_names_the_size(text: str) -> None:
    said = ""
    try:
        found = value(text)
    except ExpressionError as error:
        found, said = 0, str(error)
    assert said.startswith("x: ") or (not said and found >= 0)
