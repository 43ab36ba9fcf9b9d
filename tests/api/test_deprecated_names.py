"""Deprecated names of the Python interface warn, and give the values of the new names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import hespas
from hespas import api
from hespas.converters import load_format
from hespas.graph import Diagnostics, OpGraph, Workload
from hespas.graph.errors import FormatError, UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures"
PROGRAM = FIXTURES / "stablehlo" / "mlp.mlir"
PROFILE = FIXTURES / "profiles" / "ffn_train_rank0of2.pt.trace.json.gz"


def old(value: object, name: str) -> Any:
    """Return a deprecated attribute, which type checkers see as an object."""
    with pytest.warns(DeprecationWarning, match=rf"{name} is deprecated"):
        return getattr(value, name)


@pytest.mark.parametrize(
    ("module", "name", "new"),
    [
        (hespas, "suggest", "suggest_shapes"),
        (hespas, "system", "load_system"),
        (api, "suggest", "suggest_shapes"),
        (api, "system", "load_system"),
        (api, "step_of", "simulated_step"),
        (api, "class_totals", "op_class_summary"),
        (api, "Conservation", "ConversionAccount"),
        (api, "Dropped", "MergedOps"),
        (api, "Parts", "WriteSharding"),
        (api, "Preparation", "Lowering"),
    ],
)
def test_functions_and_classes(module: object, name: str, new: str) -> None:
    assert old(module, name) is getattr(module, new)


def test_a_simulation() -> None:
    done = hespas.simulate(PROGRAM, "H100-SXM")
    assert old(done, "path") is done.critical_path
    assert (old(done, "low_ns"), old(done, "high_ns")) == done.interval_ns
    assert old(done, "is_mixed") is done.mixes_recorded_and_estimated is False
    assert old(done, "statistics") is done.astra_statistics is None
    assert old(done, "external") is done.astra_reference is None
    assert old(done, "links") is done.network_utilization is None


def test_an_analysis() -> None:
    done = hespas.analyze(PROFILE)
    assert old(done, "found") is done.tables
    assert old(done, "against") == done.baseline == ()
    with pytest.warns(DeprecationWarning, match=r"use Analysis\.tables_by_name"):
        assert done.tables() == done.tables_by_name()


def test_reports() -> None:
    report = hespas.check(PROGRAM)
    assert old(report, "result") is report.details
    assert report.counts == report.details.counts
    for kind, name, new in (
        (api.AccuracyReport, "result", "details"),
        (api.CalibrationReport, "result", "details"),
        (api.SuggestionReport, "result", "details"),
        (api.ComparisonReport, "result", "details"),
        (api.RoundTripReport, "result", "details"),
        (api.CaptureCheckReport, "result", "details"),
        (api.LeagueReport, "result", "details"),
        (api.ServingAccuracyReport, "judgement", "errors"),
        (api.CaptureResult, "partitioned", "spmd_hlo"),
        (api.ProfiledProgram, "is_what_ran", "matches_profile"),
        (api.ProfiledProgram, "joined_share", "matched_fraction"),
        (api.ServingResult, "cache_tokens", "kv_cache_tokens"),
        (api.ServingResult, "with_rows", "per_request"),
    ):
        value: object = object.__new__(kind)
        object.__setattr__(value, new, "a value")
        assert old(value, name) == "a value"


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (hespas.simulate, "missing", "nope"),
        (hespas.simulate, "beside", 3),
        (hespas.convert, "missing", "nope"),
        (hespas.capture, "missing", "nope"),
        (hespas.analyze, "against", 3),
        (hespas.accuracy, "measured", 3),
        (hespas.calibrate, "measured", 3),
        (hespas.serve, "with_rows", 3),
    ],
)
def test_arguments(function: Callable[..., object], name: str, value: object) -> None:
    """A wrong value of an old argument is refused under the new name."""
    new = {
        "missing": "on_unknown", "beside": "overlay", "against": "baseline", "measured": "profiles",
        "with_rows": "per_request",
    }[name]  # fmt: skip
    with (
        pytest.warns(DeprecationWarning, match=rf"\({name}=\) is deprecated.*use \w+\({new}=\)"),
        pytest.raises(UsageError, match=f"`{new}"),
    ):
        function(**{name: value})


def test_arguments_of_functions_without_checks(tmp_path: Path) -> None:
    check = cast("Callable[..., None]", api.check_timeline)
    with pytest.warns(DeprecationWarning, match=r"check_timeline\(beside=\)"):
        check(tmp_path / "a.json", beside=True)
    join = cast("Callable[..., object]", api.join_profile)
    with pytest.warns(DeprecationWarning, match=r"join_profile\(measured=\)"), pytest.raises(FormatError):
        join(tmp_path / "absent", measured=tmp_path / "absent")
    lowering = cast("Callable[..., api.Lowering]", api.Lowering)
    with pytest.warns(DeprecationWarning, match=r"Lowering\(missing=\)"):
        made = lowering(
            granularity=None, missing="zero", hardware=None, estimator="auto", target=load_format("chakra")
        )
    assert made.on_unknown == old(made, "missing") == "zero"
    estimator = cast("Callable[..., Callable[..., object]]", api.graph_estimator)
    with pytest.warns(DeprecationWarning, match=r"graph_estimator\(missing=\)"):
        estimate = estimator("H100-SXM", "roofline", 1, missing="warn")
    workload = hespas.read(PROGRAM, workload=True)
    assert isinstance(workload, Workload)
    assert estimate(workload.classes[0], Diagnostics()) is not None


def test_a_server() -> None:
    names = {
        "stack": "engine",
        "cache": "kv_cache_dtype",
        "experts": "expert_dtype",
        "memory_share": "gpu_memory_utilization",
        "max_sequences": "max_num_seqs",
        "cache_tokens": "kv_cache_tokens",
        "host_us": "step_overhead_us",
        "request_ms": "request_overhead_ms",
    }
    new: dict[str, Any] = {
        "engine": "sglang", "kv_cache_dtype": "f8E4M3FN", "expert_dtype": "bf16",
        "gpu_memory_utilization": 0.5, "max_num_seqs": 8, "kv_cache_tokens": 64, "step_overhead_us": 2.0,
        "request_overhead_ms": 3.0,
    }  # fmt: skip
    server = api.Server(model="Llama-3-8B", hardware="H100-SXM", **new)
    make = cast("Callable[..., api.Server]", api.Server)
    with pytest.warns(DeprecationWarning, match=r"use Server") as warned:
        same = make(model="Llama-3-8B", hardware="H100-SXM", **{name: new[names[name]] for name in names})
    texts = " ".join(str(warning.message) for warning in warned)
    assert all(f"Server({name}=) is deprecated" in texts for name in names)
    assert same == server == replace(server, engine="sglang")
    for name in names:
        assert old(server, name) == new[names[name]]
    with pytest.raises(TypeError, match="both 'engine' and its deprecated name 'stack'"):
        make(model="Llama-3-8B", hardware="H100-SXM", stack="vllm", engine="vllm")


@pytest.mark.parametrize(
    ("package", "name", "module"),
    [
        ("hespas.converters.measured_ops", "kernel_bounds", "hespas.converters.measured_ops.device_events"),
        ("hespas.validators.calibration", "FitMemory", "hespas.fitting.approaches"),
    ],
)
def test_names_that_moved_to_another_module(package: str, name: str, module: str) -> None:
    assert old(import_module(package), name) is getattr(import_module(module), name)
    with pytest.raises(AttributeError, match="no attribute 'gone'"):
        import_module(package).gone  # noqa: B018


def test_columns_of_graphs_and_profiles() -> None:
    program = api.read(PROGRAM)
    assert isinstance(program, Workload)
    graph = program.classes[0]
    assert old(graph, "multiplicity") is graph.executions
    assert old(graph, "op_row") is graph.op_id
    executions = np.full(len(graph), 2.0)
    columns: dict[str, Any] = {column.name: getattr(graph, column.name) for column in fields(graph)}
    del columns["executions"]
    with pytest.warns(DeprecationWarning, match=r"OpGraph\(multiplicity=\)"):
        again = cast("Any", OpGraph)(**columns, multiplicity=executions)
    assert again.executions is executions
    (profile,) = api.read_profiles(PROFILE)
    assert old(profile, "kernel_row") is profile.kernel_id
    assert old(profile.host, "name_row") is profile.host.name_id
