"""The JSON schema, the structs that decode, and what the writer writes agree."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Protocol, cast

import jsonschema
import msgspec
import pytest

from hespas.converters.format import WriteOptions
from hespas.converters.op_graph import document
from hespas.converters.op_graph.json_writer import write_json
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpClass, RegionKind, Resource, Workload

Schema = Mapping[str, "Schema"]


@pytest.fixture(scope="module")
def schema() -> Schema:
    text = files("hespas.schemas").joinpath("op_graph.schema.json").read_text(encoding="utf-8")
    return cast("Schema", json.loads(text))


class Validator(Protocol):
    """The part of a jsonschema validator that is used here."""

    def validate(self, instance: object) -> None: ...


def validate(text: str | bytes, schema: Schema) -> None:
    validator = cast("Validator", jsonschema.Draft202012Validator(schema))
    validator.validate(json.loads(text))


def test_schema_is_valid(schema: Schema) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("seed", range(5))
def test_output_fits_the_schema(
    seed: int, schema: Schema, make_workload: Callable[[int, int], Workload], tmp_path: Path
) -> None:
    path = tmp_path / "graph.json"
    write_json(make_workload(seed, 30), path, WriteOptions(), Diagnostics())
    validate(path.read_bytes(), schema)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"nodes": [{"op": "a"}]}',
        '{"nodes": [{"op": "a", "deps": [-1]}]}',
        '{"nodes": [{"op": "a", "deps": [], "flop": 3}]}',
        '{"nodes": [], "rank_classes": [{"nodes": []}]}',
        '{"nodes": [{"op": "a", "deps": [], "collective": {"kind": "all_reduced"}}]}',
    ],
)
def test_wrong_document_does_not_fit(text: str, schema: Schema) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate(text, schema)


def test_smallest_document_fits(schema: Schema) -> None:
    validate('{"nodes": [{"op": "matmul", "deps": []}]}', schema)


@pytest.mark.parametrize(
    ("definition", "struct"),
    [
        ("rankClass", document.RankClass),
        ("node", document.NodeEntry),
        ("collective", document.DocumentCollective),
        ("p2p", document.P2pEntry),
        ("contraction", document.ContractionEntry),
        ("region", document.RegionEntry),
        ("extra", document.ExtraEntry),
        ("tensorType", document.TensorTypeEntry),
        ("permutation", document.PermutationSpec),
    ],
)
def test_schema_and_structs_have_the_same_fields(
    definition: str, struct: type[msgspec.Struct], schema: Schema
) -> None:
    described = schema["$defs"][definition]
    assert set(described["properties"]) == set(struct.__struct_encode_fields__)
    required = {field.encode_name for field in msgspec.structs.fields(struct) if field.required}
    assert set(described.get("required", {})) == required


def test_schema_and_document_have_the_same_fields(schema: Schema) -> None:
    assert set(schema["properties"]) == set(document.OpGraphDocument.__struct_encode_fields__)


def test_schema_lists_the_enumerations(schema: Schema) -> None:
    definitions = schema["$defs"]
    node = definitions["node"]["properties"]
    listed = {
        NodeKind: node["kind"]["enum"],
        OpClass: node["class"]["enum"],
        Resource: node["resource"]["enum"],
        CollectiveKind: definitions["collective"]["properties"]["kind"]["enum"],
        RegionKind: definitions["region"]["properties"]["kind"]["enum"],
    }
    for enumeration, names in listed.items():
        assert list(names) == [member.name.lower() for member in enumeration]
