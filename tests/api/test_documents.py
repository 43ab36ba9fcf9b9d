"""Documents for scripts match their schemas, also with unknown figures."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from hespas import api
from hespas.files.documents import document_bytes
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.hardware import device_names, load_device, load_system, system_names
from hespas.validators.accuracy import Thresholds, accuracy, accuracy_json
from hespas.validators.checker import check_workload

ROOT = Path(__file__).parents[2]
PROGRAMS = ("mlp.mlir", "llama_fsdp_tp_local_N8.mlir.gz", "while_unknown.mlir", "hand_dynamic.mlir")


class _Validator(Protocol):
    """The part of jsonschema's validator that is used here."""

    def validate(self, instance: object) -> None:
        """Raise where the instance does not fit."""


def _validate(document: object, kind: str) -> None:
    schema = json.loads((ROOT / "hespas" / "schemas" / f"{kind}.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    validator = cast("_Validator", Draft202012Validator(schema))
    content = document if isinstance(document, bytes) else document_bytes(document)
    validator.validate(json.loads(content))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("hardware", [None, "H100-SXM"])
def test_conversion_documents_fit_their_schema(program: str, hardware: str | None, tmp_path: Path) -> None:
    done = api.convert(
        ROOT / "fixtures" / "stablehlo" / program, tmp_path / "out", hardware=hardware, granularity="fused"
    )
    _validate(done.to_json(), "convert")


@pytest.mark.parametrize("program", PROGRAMS)
def test_estimate_documents_fit_their_schema(program: str) -> None:
    path = ROOT / "fixtures" / "stablehlo" / program
    found = Diagnostics()
    done = api.estimate(api.read(path, diagnostics=found), "H100-SXM", diagnostics=found)
    _validate(done.to_json(), "estimate")


@pytest.mark.parametrize("column", ["flops", "bytes_read", "duration_ns", "executions"])
@pytest.mark.parametrize(("hardware", "estimator"), [("H100-SXM", "roofline"), ("TPU-v4", "systolic")])
def test_sums_past_what_a_number_holds_are_null(column: str, hardware: str, estimator: str) -> None:
    program = api.read(ROOT / "fixtures" / "stablehlo" / "mlp.mlir")
    assert isinstance(program, Workload)
    (graph,) = program.classes
    columns: dict[str, Any] = {column: np.full(len(graph), 1.7e308)}
    huge = replace(program, classes=(replace(graph, **columns),))
    done = api.estimate(huge, hardware, estimator=estimator)
    _validate(done.to_json(), "estimate")
    stray = pytest.raises(UnsupportedError, match="its loops 1 times")  # no loop states these executions
    with stray if column == "executions" else nullcontext():
        api.simulate(huge, hardware, estimator=estimator, granularity="op")
    check_workload(huge, "chakra")
    refused = pytest.raises(FormatError, match="sum of operation times overflows")
    with {"duration_ns": refused, "executions": stray}.get(column, nullcontext()):
        api.simulate(huge)


@pytest.mark.parametrize("column", ["flops", "duration_ns", "executions"])
@pytest.mark.parametrize("figure", [1e300, 1.7e308])
def test_accuracy_bears_figures_past_what_a_number_holds(column: str, figure: float) -> None:
    program = api.read(ROOT / "fixtures" / "stablehlo" / "mlp.mlir")
    assert isinstance(program, Workload)
    (graph,) = program.classes
    columns: dict[str, Any] = {"duration_ns": np.full(len(graph), 2e3), column: np.full(len(graph), figure)}
    huge = replace(program, classes=(replace(graph, **columns),))
    done = accuracy([huge], ["H100-SXM"])
    _validate(
        accuracy_json(done, Thresholds(max_mape=nan, max_e2e=nan, min_coverage=nan)),
        "accuracy",
    )


@pytest.mark.parametrize("granularity", ["op", "fused", "region"])
def test_the_account_balances(granularity: api.Granularity, tmp_path: Path) -> None:
    """Operations and bytes that are not in the output are named, to the last one."""
    done = api.convert(
        ROOT / "fixtures" / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz",
        tmp_path / "out",
        granularity=granularity,
        ranks=range(2, 5),
    )
    account = done.conservation
    assert account is not None
    assert account.num_ranks == 3
    passes = [dropped for dropped in account.dropped if dropped.reason.startswith("pass.")]
    assert account.before.ops - account.after.ops == sum(dropped.count for dropped in passes)
    elided = sum(dropped.bytes_moved for dropped in passes)
    assert account.before.bytes_moved - account.after.bytes_moved == pytest.approx(elided)
    assert account.before.flops == pytest.approx(account.after.flops, rel=1e-12)


def test_every_splitting_costs_the_same_traffic_once_fused(tmp_path: Path) -> None:
    """Grouping into regions moves no bytes less than the operations it groups."""
    program = ROOT / "fixtures" / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz"
    sums: list[tuple[float, float]] = []
    for granularity in ("fused", "region"):
        done = api.convert(program, tmp_path / granularity, hardware="H100-SXM", granularity=granularity)
        account = done.conservation
        assert account is not None
        sums.append((account.after.bytes_moved, account.after.device_time_ns))
    assert sums[0] == pytest.approx(sums[1])


def test_an_output_of_the_program_is_written_by_a_fusion(tmp_path: Path) -> None:
    """%1 leaves the program and feeds %3: both are written, and only one read is saved."""
    program = tmp_path / "two_results.mlir"
    program.write_text(
        "func.func @main(%a: tensor<1048576xf32>) -> (tensor<1048576xf32>, tensor<1048576xf32>) {\n"
        "  %1 = stablehlo.add %a, %a : tensor<1048576xf32>\n"
        "  %3 = stablehlo.negate %1 : tensor<1048576xf32>\n"
        "  return %1, %3 : tensor<1048576xf32>, tensor<1048576xf32>\n"
        "}\n"
    )
    done = api.convert(program, tmp_path / "fused.json", granularity="fused")
    account = done.conservation
    assert account is not None
    tensor = 4 * 1048576
    assert account.before.bytes_moved == 4 * tensor
    assert account.after.bytes_moved == 3 * tensor


def test_an_unknown_operation_stands_alone_and_poisons_nothing(tmp_path: Path) -> None:
    program = tmp_path / "unknown.mlir"
    program.write_text(
        "func.func @main(%a: tensor<64x64xf32>) -> tensor<64x64xf32> {\n"
        "  %0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0]"
        " : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>\n"
        "  %1 = stablehlo.custom_call @mystery(%0) : (tensor<64x64xf32>) -> tensor<64x64xf32>\n"
        "  %2 = stablehlo.dot_general %1, %1, contracting_dims = [1] x [0]"
        " : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>\n"
        "  return %2 : tensor<64x64xf32>\n"
        "}\n"
    )
    done = api.convert(program, tmp_path / "region.json", granularity="region", hardware="L4")
    assert isinstance(done.value, Workload)
    assert done.conservation is not None
    assert done.conservation.after.flops == 2 * 2 * 64**3
    assert done.conservation.after.unknown_ops == 1


def test_the_document_of_devices_fits_its_schema() -> None:
    systems = [load_system(name) for name in system_names()]
    document = api.devices_document([load_device(name) for name in device_names()], systems)
    _validate(document, "devices")
    rows = json.loads(document_bytes(document))["devices"]
    assert {"H100-SXM", "TPU-v4"} <= {row["name"] for row in rows}
    shown = {row["name"]: row for row in json.loads(document_bytes(document))["systems"]}
    assert [each["size"] for each in shown["dgx-h100"]["dimensions"]] == [8, -1]
    assert shown["dgx-h100"]["max_devices"] == -1
    assert shown["tpu-v5e"]["max_devices"] == 256


def test_serving_documents_fit_their_schema() -> None:
    server = api.Server(model="Llama-3-8B", hardware="H100-SXM")
    done = api.serve(server, "closed:concurrency=2,requests=4,prompt=64,output=1", per_request=True)
    _validate(done.to_json(), "serving")  # answers of one token have no time per token
    assert json.loads(done.to_json())["rows"][0]["tpot_ms"] is None
    _validate(api.serve(server, "poisson:rate=2,requests=3,prompt=64,output=2").to_json(), "serving")


def test_documents_of_judged_servers_fit_their_schema(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    head = "model_path,system,backend,mode,isl,osl,tp_size,batch_size,silicon_ttft_ms,silicon_tpot_ms"
    runs = [f"meta-llama/Llama-3-8B,h100_sxm,{stack},agg,64,4,1,2,9,8" for stack in ("vllm", "tgi")]
    table.write_text("\n".join((head, *runs)), encoding="utf-8")
    _validate(api.validate_serving(table).to_json(), "serving_accuracy")
    runs_file, requests = tmp_path / "recorded.csv", tmp_path / "requests.csv"
    runs_file.write_text(
        "trace,accelerator,model,engine,tp,precision,max_num_seqs,max_num_batched_tokens\n"
        "t,H100-SXM,Llama-3-8B,vLLM,1,bf16,4,64\nu,moon,Llama-3-8B,vLLM,1,bf16,4,64\n",
        encoding="utf-8",
    )
    requests.write_text(
        "trace,queued_s,first_token_s,last_token_s,input_tokens,output_tokens\n"
        + "".join(f"{trace},{at},{at},{at + 1},8,1\n" for trace in "tu" for at in range(3)),
        encoding="utf-8",
    )
    done = api.validate_serving(recorded=(runs_file, requests))
    assert "1 recorded runs replayed" in repr(done)
    assert len(done.to_pandas()) == 1
    _validate(done.to_json(), "serving_accuracy")  # answers of one token: unknown figures are null
