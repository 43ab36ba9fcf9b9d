"""Recorded steps in every written format have the same simulated step as the recording."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

import hespas
from hespas.cli.terminal import step_text
from hespas.graph import Diagnostics, StepFacts
from tests.converters.pytorch.traces import Json, annotation, host, kernel, launch, write_kineto

STEPS = 5
FIGURES = ("recorded_steps", "recorded_step_ns", "recorded_period_ns")

DIMS: Json = {"Input Dims": [[512, 512], [512, 512]], "Input type": ["float", "float"]}


def record(folder: Path, ranks: int = 2) -> Path:
    """Write steps of 1.9 ms that start every 2.0 ms, with device events over 1.07 ms of each."""
    folder.mkdir()
    for rank in range(ranks):
        events: list[Json] = []
        for step in range(STEPS):
            start = 1000 + 2000 * step
            events.append(annotation(f"ProfilerStep#{5 + step}", start, 1900))
            for place, (begin, length) in enumerate(((30, 300), (700, 400))):
                number = 2 * step + place + 1
                at = start + 10 + 20 * place
                events += [host("aten::mm", at, 8, number, DIMS), launch(at + 2, number)]
                events.append(kernel("gemm", start + begin, length, number))
        stated = {"backend": "nccl", "rank": rank, "world_size": ranks}
        write_kineto(folder / f"rank{rank}.pt.trace.json", events, distributedInfo=stated)
    return folder


def figures(path: Path) -> tuple[object, ...]:
    document = json.loads(hespas.simulate(path).to_json())
    return tuple(document[name] for name in FIGURES)


@pytest.mark.parametrize(
    ("form", "name"),
    [("op-graph", "g.json"), ("op-graph-arrow", "g.arrow"), ("chakra", "et"), ("chakra-json", "et.json")],
)
def test_written_steps_equal_the_recording(tmp_path: Path, form: str, name: str) -> None:
    source = record(tmp_path / "recording", 1 if form == "chakra-json" else 2)
    done = hespas.convert(source, tmp_path / name, target_format=form)
    assert figures(tmp_path / name) == figures(source) == (STEPS, 1_070_000.0, 2_000_000.0)
    assert "chakra.attachments" not in {found.code for found in done.diagnostics}


def test_written_estimates_are_not_as_recorded(tmp_path: Path) -> None:
    source = record(tmp_path / "recording")
    hespas.convert(source, tmp_path / "et", target_format="chakra", hardware="H100")
    assert figures(tmp_path / "et") == (STEPS, None, None)


def test_a_foreign_attribute_of_that_name_is_ignored_with_a_warning(tmp_path: Path) -> None:
    source = record(tmp_path / "recording", 1)
    hespas.convert(source, tmp_path / "et.json", target_format="chakra-json")
    document = (tmp_path / "et.json").read_text().replace("span_ns", "another")
    (tmp_path / "et.json").write_text(document)
    found = Diagnostics()
    done = hespas.simulate(tmp_path / "et.json", diagnostics=found)
    assert json.loads(done.to_json())["recorded_steps"] is None
    assert [row.code for row in found].count("chakra.recorded-steps") == 1


def test_rates_of_a_recording_are_of_the_period_of_its_steps(tmp_path: Path) -> None:
    source = record(tmp_path / "recording")
    done = hespas.analyze(source, tokens=1_000_000)
    assert done.throughput.tokens_per_s == pytest.approx(5.0e8)
    assert json.loads(done.to_json())["step_period_ns"] == 2_000_000.0
    words = "1.070 ms per step (5 recorded steps, a step every 2.000 ms, span 9.070 ms)"
    assert done.headline().startswith(words)
    assert step_text(hespas.simulate(source), "").startswith(words)
    assert (
        "1.070 ms per step, 5 recorded steps, a step every 2.000 ms, span"
        in hespas.simulate(source).headline()
    )


def test_mfu_above_the_peak_is_a_warning(tmp_path: Path) -> None:
    source = record(tmp_path / "recording")
    for model_flops, count in ((1e9, 0), (1e15, 1)):
        found = Diagnostics()
        done = hespas.analyze(source, hardware="H100", model_flops=model_flops, diagnostics=found)
        assert (done.throughput.mfu > 1) == bool(count)
        assert [row.code for row in found].count("rates.mfu-above-peak") == count


def test_stated_facts_of_a_recording_are_rates_of_the_period(tmp_path: Path) -> None:
    source = record(tmp_path / "recording")
    workload = hespas.read(source)
    facts = StepFacts(kind="training", tokens=1_000_000, model_flops=nan, ranks=2, dtype="f32")
    stated = replace(workload, metadata={**workload.metadata, **facts.metadata()})
    assert hespas.simulate(stated).throughput.tokens_per_s == pytest.approx(5.0e8)
