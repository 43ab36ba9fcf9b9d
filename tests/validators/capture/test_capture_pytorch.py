"""Execution traces of PyTorch on Gloo against the profiles of the same steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from hespas import api
from hespas.graph.errors import UsageError
from tests.converters.pytorch.traces import Json, Value, host, kernel, launch, node, write_et, write_kineto

JOBS = Path(__file__).parents[3] / "fixtures" / "rescale"


@pytest.mark.parametrize(("job", "rank"), [(2, 0), (2, 1), (4, 0), (4, 3), (8, 7)])
def test_an_execution_trace_is_what_its_profile_says_ran(job: int, rank: int) -> None:
    folder = JOBS / f"gloo{job}"
    report = api.validate_capture(folder / f"et.{rank}.json.gz", folder / f"kineto.{rank}.json.gz")
    done = report.details
    assert report.equal
    assert (done.by, done.ranks, done.runs) == ("operation", (rank,), 1)
    assert done.captured_operations - done.measured_operations == 3
    assert {each.operation for each in done.operations if each.explained} == {
        "DistributedDataParallel.forward",
        "Optimizer.step#SGD.step",
        "Optimizer.zero_grad#SGD.zero_grad",
    }
    assert (done.order.checked, done.order.violated) == (245, 0)
    assert done.captured_collectives == done.measured_collectives == 2
    assert done.captured_bytes == done.measured_bytes == 4 * (64 * 192 * 2 + 64 + 192) + 4


def test_an_execution_trace_is_itself() -> None:
    path = JOBS / "gloo2" / "et.0.json.gz"
    done = api.validate_capture(path, path).details
    assert done.equal
    assert (done.operations, done.order.unknown) == ((), 0)
    assert done.order.checked == 251


def test_collectives_over_other_ranks_are_told() -> None:
    done = api.validate_capture(JOBS / "gloo4" / "et.0.json.gz", JOBS / "gloo2" / "kineto.0.json.gz").details
    assert not done.equal
    assert done.differences == len(done.collectives) == 2
    assert done.collectives[0].captured == "all_reduce over {0, 1, 2, 3}, 99,328 bytes"
    assert done.collectives[0].measured == "all_reduce over {0, 1}, 99,328 bytes"


def test_an_operation_less_and_one_too_early_are_told(tmp_path: Path) -> None:
    """The profile without its GELU, and with its first product before all that makes its operands."""
    folder = JOBS / "gloo2"
    profile = json.loads(gzip.decompress((folder / "kineto.0.json.gz").read_bytes()))
    events = profile["traceEvents"]
    gelu = next(event for event in events if event.get("name") == "aten::gelu")
    events.remove(gelu)
    product = next(event for event in events if event.get("name") == "aten::mm")
    product["ts"] = min(event["ts"] for event in events if event.get("name", "").startswith("aten::")) + 1
    changed = tmp_path / "kineto.json"
    changed.write_text(json.dumps(profile))
    done = api.validate_capture(folder / "et.0.json.gz", changed).details
    differences = [each for each in done.operations if not each.explained]
    assert [(each.operation, each.captured, each.measured) for each in differences] == [
        ("aten::gelu", 1.0, 0.0)
    ]
    assert done.order.violated > 0
    assert done.order.violations[0].early_ns > 1e6


def test_a_profile_is_no_program(tmp_path: Path) -> None:
    path = JOBS / "gloo2" / "kineto.0.json.gz"
    with pytest.raises(UsageError, match="expected a captured program, and this is a profile"):
        api.validate_capture(path, path)


def test_the_document_holds_every_figure() -> None:
    folder = JOBS / "gloo2"
    report = api.validate_capture(folder / "et.0.json.gz", folder / "kineto.0.json.gz")
    document = report.to_dict()
    assert (document["schema"], document["equal"], document["differences"]) == (
        "hespas.capture-check/1",
        True,
        0,
    )
    assert document["order"]["exact"] == 245
    assert len(report.to_pandas()) == len(document["operations"]) == 3
    assert report.headline() == "0 matches the trace (1 rank, 1 run)"


def test_an_operation_of_several_kernels_is_one(tmp_path: Path) -> None:
    """A product that is split along its inner dimension, and the sum of the parts."""
    tensors: list[Value] = [
        ([number, number, 0, 4096, 4, "cuda:0"], [64, 64], "Tensor(float)") for number in (5, 6, 7)
    ]
    program = write_et(tmp_path / "et.json", [node(10, "aten::mm", 2, 11, tensors[:2], tensors[2:])])
    shapes: Json = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    events = [host("aten::mm", 0, 9, 11, shapes), launch(1, 1), launch(3, 2)]
    events += [kernel("gemm_split_k", 20, 5, 1), kernel("splitKreduce_kernel", 26, 2, 2)]
    done = api.validate_capture(program, write_kineto(tmp_path / "kineto.json", events)).details
    assert (done.captured_operations, done.measured_operations, done.operations) == (1, 1, ())
