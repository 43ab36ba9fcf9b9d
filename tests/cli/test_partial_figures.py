"""Figures of a part of the operations, or of several sources, are labelled in the text output."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hespas.cli.main import app
from tests.converters.pytorch.traces import Json, host, kernel, launch, write_kineto

CALL = """module @call {
  func.func public @main(%a: tensor<128x256xf32>) -> tensor<128x256xf32> {
    %0 = stablehlo.custom_call @acme_rotary(%a) : (tensor<128x256xf32>) -> tensor<128x256xf32>
    return %0 : tensor<128x256xf32>
  }
}
"""
"""A program whose only operation has no cost rule."""
MM: Json = {"Input Dims": [[256, 256], [256, 256]], "Input type": ["float", "float"]}


def _traces(folder: Path, *operations: str) -> Path:
    """A folder with a trace of one rank, whose ``operations`` launch a kernel each."""
    folder.mkdir()
    events: list[Json] = []
    for number, name in enumerate(operations):
        at_us = 100.0 * number
        events += [host(name, at_us, 9, number + 1, MM), launch(at_us + 2, number)]
        events.append(kernel(f"kernel {number}", at_us + 20, 30, number))
    write_kineto(folder / "rank0.json", events)
    return folder


def _first_line(*arguments: str | Path) -> list[str]:
    done = CliRunner().invoke(app, [str(each) for each in (*arguments, "--hardware", "H100-SXM")])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("operations", "least"), [(("aten::mm",), False), (("aten::mm", "my::op"), True), (("my::op",), False)]
)
def test_an_estimate_of_some_operations_is_a_least_one(
    operations: tuple[str, ...], least: bool, tmp_path: Path
) -> None:
    first, *others = _first_line("estimate", _traces(tmp_path / "job", *operations))
    (work,) = (line for line in others if " of work per rank and step" in line)
    assert "at least " not in first  # all other operations have recorded times
    assert ("at least " in work) == least
    assert ("unknown of work" in work) == (operations == ("my::op",))
    mixed = "mixed: 1 operation with durations recorded on an unknown device, the others estimated"
    assert (mixed in others[:2]) == ("my::op" in operations)


def test_a_step_without_any_time_is_unknown(tmp_path: Path) -> None:
    program = tmp_path / "call.mlir"
    program.write_text(CALL)
    first, work, *_ = _first_line("estimate", program)
    assert first.startswith("unknown per step on H100-SXM")
    assert "unknown of work" in work


def test_an_estimate_of_a_table_too(tmp_path: Path) -> None:
    rows = ["matmul,,bf16,64,64,64,,,", "collective,all_reduce,bf16,,,,8,,8"]
    for chosen, least in ((rows[:1], False), (rows, True), (rows[1:], False)):
        path = tmp_path / "table.csv"
        path.write_text("\n".join(("kind,op,dtype,m,n,k,ranks,message_bytes,ranks_per_node", *chosen)) + "\n")
        line = _first_line("estimate", "--table", path)[0]
        assert ("at least " in line) == least


def test_a_simulation_with_recorded_times_is_mixed(tmp_path: Path) -> None:
    whole = _first_line("simulate", _traces(tmp_path / "known", "aten::mm"))
    assert not any(line.startswith("mixed") for line in whole)
    mixed = _first_line("simulate", _traces(tmp_path / "mixed", "aten::mm", "my::op"))
    text = "mixed: 1 operation with durations recorded on an unknown device, the others estimated"
    assert text in mixed[:3]
