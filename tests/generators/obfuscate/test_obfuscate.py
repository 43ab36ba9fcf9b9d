"""Obfuscated workloads: no name of the source, an equal topology, close times, valid on all ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.generators.llm import Layout, Training
from hespas.generators.obfuscate import Key, Level, Obfuscate, reveal_names
from hespas.generators.obfuscate.layers import Run, repeated_runs
from hespas.generators.obfuscate.names import public_profile_text
from hespas.generators.obfuscate.shapes import SIGNIFICANT_BITS, rounded_costs, rounded_extents
from hespas.graph import (
    Diagnostics,
    ExtraTable,
    OpGraph,
    Profile,
    Severity,
    StepFacts,
    StringTable,
    Workload,
    step_facts,
)
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.validators.privacy.library import training_step

KEY = Key(b"a key of this test")
LEVELS: tuple[Level, ...] = ("names", "shapes", "layers")
SAMPLES = Path(hespas.__file__).parent / "samples" / "files"


@cache
def untimed() -> Workload:
    """Return two pipeline stages of two tensor-parallel ranks."""
    return hespas.llm_step("Llama-3.2-1B", tp=2, pp=2, seq=512, global_batch=4).workload()


@cache
def step() -> Workload:
    """Return the same step with times on an H100."""
    return training_step("Llama-3.2-1B", Layout(tp=2, pp=2), Training(seq=512, global_batch=4))


def hidden(level: Level, workload: Workload, key: Key = KEY) -> Workload:
    return Obfuscate(key=key, level=level)(workload, Diagnostics())


def texts(workload: Workload) -> set[str]:
    return {text for graph in workload.classes for text in graph.strings if len(text) > 3}


def test_names_keep_topology_and_costs() -> None:
    before, after = step(), hidden("names", step())
    for old, new in zip(before.classes, after.classes, strict=True):
        assert old.data_deps.equals(new.data_deps)
        assert old.control_deps.equals(new.control_deps)
        assert old.operands.equals(new.operands)
        np.testing.assert_array_equal(old.flops, new.flops)
        np.testing.assert_array_equal(old.duration_ns, new.duration_ns)
        np.testing.assert_array_equal(old.kind, new.kind)
        np.testing.assert_array_equal(old.collectives.comm_bytes, new.collectives.comm_bytes)
    assert hespas.simulate(after).step_ns == hespas.simulate(before).step_ns


def test_estimates_of_hidden_names_are_equal() -> None:
    before, after = untimed(), hidden("names", untimed())
    assert (
        hespas.simulate(after, "H100-SXM", system="dgx-h100").step_ns
        == hespas.simulate(before, "H100-SXM", system="dgx-h100").step_ns
    )


@pytest.mark.parametrize("level", LEVELS)
def test_no_name_of_the_source_is_written(level: Level, tmp_path: Path) -> None:
    for destination in ("traces/", "step.json", "step.arrow"):
        path = tmp_path / destination
        hespas.write(hidden(level, step()), path)
        files = [each for each in ([path] if path.is_file() else path.rglob("*")) if each.is_file()]
        data = b"".join(each.read_bytes() for each in files)
        names = {text for text in texts(step()) if "." in text or "/" in text or "::" in text}
        assert len(names) > 100
        assert [name for name in names if name.encode() in data] == []


@pytest.mark.parametrize("level", LEVELS)
def test_all_ranks_stay_valid_and_times_close(level: Level) -> None:
    after = hidden(level, step())
    found = hespas.check(after, profile="astra-sim").violations
    assert [each for each in found if each.severity is Severity.ERROR] == []
    assert not [each for each in found if each.code == "GR002"]
    change = hespas.simulate(after).step_ns / hespas.simulate(step()).step_ns
    assert change == pytest.approx(1.0, abs={"names": 0.0, "shapes": 0.025, "layers": 0.08}[level])


def test_the_command_keeps_the_step_within_five_percent(tmp_path: Path) -> None:
    before = hespas.simulate(step()).step_ns
    for number in range(3):
        key = tmp_path / f"{number}.key"
        key.write_text(f"a key of this test: {number}")
        done = hespas.convert(step(), tmp_path / str(number), obfuscate=key, obfuscate_level="layers")
        assert hespas.simulate(done.value).step_ns == pytest.approx(before, rel=0.05)


def test_layers_and_shapes_are_not_the_original_ones() -> None:
    after = hidden("layers", step())
    assert sum(map(len, after.classes)) < sum(map(len, step().classes))
    assert not any(len(graph.contractions) or len(graph.operands.values) for graph in after.classes)
    other = hidden("layers", step(), Key(b"another key of this test"))
    assert [len(graph) for graph in after.classes] != [len(graph) for graph in other.classes]


def test_shapes_agree_along_edges() -> None:
    after = hidden("shapes", step())
    for old, new in zip(step().classes, after.classes, strict=True):
        extents = new.types.dims[new.types.dims > 0]
        assert (extents & (extents - 1) == 0).all()
        shape_of: dict[tuple[int, ...], tuple[int, ...]] = {}
        for before, row in zip(old.operands.values.tolist(), new.operands.values.tolist(), strict=True):
            assert shape_of.setdefault(old.types.shape(before), new.types.shape(row)) == new.types.shape(row)


def test_costs_change_by_one_part_in_32() -> None:
    costs = np.array([0.0, np.nan, np.inf, 0.3, 1.4, 31.0, 33.0, 1e6, 123456789.0, 3.3e15])
    rounded = rounded_costs(costs)
    np.testing.assert_array_equal(rounded[:3], costs[:3])
    assert np.abs(rounded[3:] / costs[3:] - 1).max() <= 0.5**SIGNIFICANT_BITS
    np.testing.assert_array_equal(rounded_costs(rounded), rounded)
    np.testing.assert_array_equal(rounded_costs(np.arange(32.0)), np.arange(32.0))
    np.testing.assert_array_equal(
        rounded_extents(np.array([-1, 0, 1, 3, 5, 11008, 4096])), [-1, 0, 1, 4, 4, 8192, 4096]
    )


def test_sizes_of_collectives_stay_divisible_by_the_number_of_ranks() -> None:
    sizes = rounded_costs(np.array([1 << 12, 3145728.0, 14680064.0, 123456789.0]))
    assert (sizes % 64 == 0).all()


def test_runs_of_equal_blocks() -> None:
    assert repeated_runs(np.array([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8])) == [Run(1, 3, 3)]
    assert repeated_runs(np.array([1, 2, 1, 2, 5])) == []
    assert repeated_runs(np.array([1, 2] * 4 + [7, 8, 9] * 3)) == [Run(0, 2, 4), Run(8, 3, 3)]
    assert repeated_runs(np.array([], np.int64)) == []


def marked(workload: Workload) -> Workload:
    """Return a workload whose metadata, attributes, documents and labels all hold a secret."""
    classes = list[OpGraph]()
    for graph in workload.classes:
        texts = ["", *(f"SECRET{row}" for row in range(1, len(graph.strings))), *KEYS, "SECRET"]
        rows = [(-1, 0, tag, b"SECRET") for tag in (0, 200, 201, 202)]
        rows += [(0, len(graph.strings) + row, 0, b"SECRET") for row in range(len(KEYS) + 1)]
        rows += [(0, 0, tag, b"SECRET") for tag in (64, 107, 108)]
        classes.append(
            replace(
                graph,
                name="SECRET",
                strings=StringTable.from_strings(texts),
                extra=ExtraTable.from_rows(rows),
                attachments={"SECRET": b"SECRET"},
            )
        )
    metadata = {name: f"SECRET/{name}" for name in (*workload.metadata, *METADATA)}
    return replace(workload, name="SECRET", classes=tuple(classes), metadata=metadata)


KEYS = ("accumulator_bits", "donated_to", "in_place", "mac_noise_sigma", "returned", "source_dtype")
METADATA = (
    *("format", "version", "device", "is_scheduled", "num_partitions", "num_replicas", "estimated_on"),
    *("guessed_values", "program_bytes", "step_facts", "whole_job_parts", "host"),
)


@pytest.mark.parametrize("destination", ["traces/", "step.json", "step.arrow", "step.dot", "step.graphml"])
def test_texts_in_fields_of_numbers_and_schemas_are_dropped(destination: str, tmp_path: Path) -> None:
    path = tmp_path / destination
    hespas.convert(
        marked(step()), path, obfuscate=str(tmp_path / "k"), target_format=FORMATS.get(destination)
    )
    files = [path] if path.is_file() else list(path.iterdir())
    assert not [each for each in files if b"SECRET" in each.read_bytes()]


FORMATS = {"traces/": "chakra"}


@pytest.mark.parametrize(("framework", "kept"), [("megatron", "megatron"), ("our-framework", "")])
def test_only_public_frameworks_are_kept(framework: str, kept: str) -> None:
    facts = StepFacts(kind="training", phase="training", framework=framework)
    workload = replace(step(), metadata={**step().metadata, **facts.metadata()})
    hidden = step_facts(Obfuscate(key=KEY, level="names")(workload, Diagnostics()).metadata)
    assert hidden is not None
    assert (hidden.framework, hidden.phase) == (kept, "training")


def test_texts_of_profiles_that_look_public_are_checked() -> None:
    assert [
        public_profile_text(column, text, KEY)
        for column, text in (
            ("shapes_id", "[[8, 16], []]"),
            ("shapes_id", "f32[8,16]{1,0:T(8,128)}"),
            ("grid_id", "[[1,1,1],[128,1,1]]"),
            ("category_id", "kernel"),
            ("kind_id", "all-reduce"),
            ("dtype_id", '["c10::BFloat16", "long int", "MyModel"]'),
        )
    ] == [
        "[[8, 16], []]",
        "f32[8,16]{1,0:T(8,128)}",
        "[[1,1,1],[128,1,1]]",
        "kernel",
        "all-reduce",
        '["c10::BFloat16", "long int", "other"]',
    ]
    for column in ("shapes_id", "grid_id", "ranks_id", "category_id", "kind_id"):
        assert Key.is_token(public_profile_text(column, "[MyModel, 8]", KEY))


def test_untimed_steps_keep_their_time_on_a_reference_device(tmp_path: Path) -> None:
    source = SAMPLES / "moe_all_to_all.hlo.txt"
    hespas.convert(source, tmp_path / "x.json", obfuscate=tmp_path / "k", obfuscate_level="layers")
    before, after = (hespas.simulate(path, "H100-SXM").step_ns for path in (source, tmp_path / "x.json"))
    assert after == pytest.approx(before, rel=0.05)


def test_a_step_without_time_is_obfuscated(tmp_path: Path) -> None:
    (tmp_path / "empty.mlir").write_text(
        "module { func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> } }"
    )
    done = hespas.convert(
        tmp_path / "empty.mlir",
        tmp_path / "x.json",
        hardware="H100-SXM",
        obfuscate=tmp_path / "k",
        obfuscate_level="layers",
    )
    assert isinstance(done.value, Workload)


def test_names_come_back_with_the_key(tmp_path: Path) -> None:
    source, key = SAMPLES / "pipeline_2x2", tmp_path / "trace.key"
    hespas.convert(source, tmp_path / "shared", obfuscate=key)
    hespas.convert(tmp_path / "shared", tmp_path / "back", reveal=key)
    before, after = hespas.read(source), hespas.read(tmp_path / "back")
    assert isinstance(before, Workload)
    assert isinstance(after, Workload)
    for old, new in zip(before.classes, after.classes, strict=True):
        assert [old.node_name(node) for node in range(len(old))] == [
            new.node_name(node) for node in range(len(new))
        ]


def test_equal_keys_give_equal_files(tmp_path: Path) -> None:
    key = tmp_path / "trace.key"
    for name in ("one", "two"):
        hespas.convert(SAMPLES / "pipeline_2x2", tmp_path / name, obfuscate=key)
    one, two = (
        {each.name: each.read_bytes() for each in (tmp_path / name).glob("*.et")} for name in ("one", "two")
    )
    assert {name.split(".", 1)[1]: data for name, data in one.items()} == {
        name.split(".", 1)[1]: data for name, data in two.items()
    }


def test_another_key_reveals_nothing(tmp_path: Path) -> None:
    hespas.convert(SAMPLES / "pipeline_2x2", tmp_path / "shared", obfuscate=tmp_path / "trace.key")
    (tmp_path / "other.key").write_text("0123456789abcdef0123456789abcdef")
    with pytest.raises(UsageError, match="no name of the input was made with this key"):
        hespas.convert(tmp_path / "shared", tmp_path / "back", reveal=tmp_path / "other.key")


def test_copies_of_the_runtime_keep_their_names(tmp_path: Path) -> None:
    source, key = SAMPLES / "ffn_train_rank0of2.pt.trace.json.gz", tmp_path / "trace.key"
    hespas.convert(source, tmp_path / "shared.json", target_format="op-graph", obfuscate=key)
    hespas.convert(tmp_path / "shared.json", tmp_path / "back.json", target_format="op-graph", reveal=key)
    hespas.convert(source, tmp_path / "plain.json", target_format="op-graph")
    before, after = (hespas.read(tmp_path / name) for name in ("plain.json", "back.json"))
    assert isinstance(before, Workload)
    assert isinstance(after, Workload)
    for old, new in zip(before.classes, after.classes, strict=True):
        names = [old.node_name(node) for node in range(len(old))]
        assert any(name.startswith("Memcpy HtoD") for name in names)
        assert names == [new.node_name(node) for node in range(len(new))]


def test_a_key_is_never_part_of_the_output(tmp_path: Path) -> None:
    source, key, folder = SAMPLES / "pipeline_2x2", tmp_path / "trace.key", tmp_path / "shared"
    key.write_text("0123456789abcdef")
    folder.mkdir()
    for path, inside in ((key, key), (folder, folder / "trace.key")):
        with pytest.raises(UsageError, match="is part of the output"):
            hespas.convert(source, path, target_format="chakra", obfuscate=inside, overwrite=True)
    with pytest.raises(UsageError, match="standard input"):
        hespas.convert(source, folder, obfuscate="-")
    assert key.read_text() == "0123456789abcdef"


def test_obfuscating_twice_changes_names_only() -> None:
    for level in LEVELS[:2]:
        once = hidden(level, step())
        twice = hidden(level, once, Key(b"another key of this test"))
        for old, new in zip(once.classes, twice.classes, strict=True):
            np.testing.assert_array_equal(old.flops, new.flops)
            np.testing.assert_array_equal(old.duration_ns, new.duration_ns)
            np.testing.assert_array_equal(old.types.dims, new.types.dims)
            np.testing.assert_array_equal(old.collectives.comm_bytes, new.collectives.comm_bytes)


def test_profiles_hide_names_only(tmp_path: Path) -> None:
    source, key = SAMPLES / "ffn_train_rank0of2.pt.trace.json.gz", tmp_path / "trace.key"
    hespas.convert(source, tmp_path / "step.chrome.json", obfuscate=key)
    data = (tmp_path / "step.chrome.json").read_bytes()
    profile = hespas.read(source)
    assert isinstance(profile, Profile)
    kernels = {text for text in profile.strings if "::" in text or "gemm" in text}
    assert kernels
    assert [text for text in kernels if text.encode() in data] == []
    with pytest.raises(UnsupportedError, match="profile"):
        hespas.convert(source, tmp_path / "x.chrome.json", obfuscate=key, obfuscate_level="layers")


def test_tokens_of_two_keys() -> None:
    graph = hidden("names", step()).classes[0]
    both = hidden(
        "names", replace(step(), classes=(graph,), rank_class=np.zeros(1, np.int32)), Key(b"k" * 16)
    )
    revealed, known, foreign = reveal_names(both, Key(b"k" * 16))
    assert known
    assert not foreign
    assert isinstance(revealed, Workload)
    assert texts(revealed) >= {text for text in graph.strings if Key.is_token(text)}
