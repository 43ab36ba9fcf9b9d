"""Schemas are those of the documents' types, and as strict: every key, no other, numbers or null."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from jsonschema import Draft202012Validator

from tools.schemas import DOCUMENTS, FOLDER, schema_text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_is_that_of_its_type(name: str) -> None:
    text = schema_text(name)
    Draft202012Validator.check_schema(json.loads(text))
    assert (FOLDER / f"{name}.schema.json").read_text() == text, "run 'python -m tools.schemas'"


def _is_valid(document: dict[str, object]) -> bool:
    rules = cast("Any", Draft202012Validator(json.loads(schema_text("compare"))))
    return bool(rules.is_valid(document))


def test_a_schema_holds_every_key_and_no_other() -> None:
    change: dict[str, object] = {
        "what": "x",
        "figure": "MAPE",
        "before": 0.1,
        "after": None,
        "difference": None,
    }
    document: dict[str, object] = {
        "schema": "hespas.compare/1",
        "hespas_version": "0.1.0",
        "inputs": ["a", "b"],
        "diagnostics": [],
        "max_regression": None,
        "changes": [change],
        "unlike": "",
        "only_base": [],
        "only_new": [],
        "regressions": [],
    }
    assert _is_valid(document)
    for key in document:
        assert not _is_valid({name: value for name, value in document.items() if name != key}), key
    for wrong in (
        {"other": 1},
        {"schema": "hespas.compare/2"},
        {"max_regression": "1"},
        {"changes": [change | {"figure": "bias"}]},
        {"changes": [change | {"more": 1}]},
        {"changes": [{"what": "x"}]},
    ):
        assert not _is_valid(document | wrong), wrong
