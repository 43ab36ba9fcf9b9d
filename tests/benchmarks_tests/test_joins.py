"""Programs that JAX profiles during the test: joins match the text of the program and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hespas import api
from hespas.graph import Profile

pytest.importorskip("jax")

ROOT = Path(__file__).parents[2]
PROGRAMS = ("mlp_train", "scan_layers_train", "collectives_shard_map", "remat_unrolled", "remat_scan")
LEAST = 0.98


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of recorded programs, by a process that asks for fake devices before JAX starts."""
    folder = tmp_path_factory.mktemp("recorded")
    command = [sys.executable, "-m", "benchmarks.joins", "--record", str(folder), *PROGRAMS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return folder


def _profile(folder: Path) -> Profile:
    profile = api.read(folder / "step.xplane.pb")
    assert isinstance(profile, Profile)
    return profile


@pytest.mark.parametrize("name", PROGRAMS)
def test_plain_text_joins_to_its_own_profile(recorded: Path, name: str) -> None:
    profile = _profile(recorded / name)
    plain = api.join_profile((recorded / name / "plain.mlir").read_bytes(), profile)
    assert plain.share >= LEAST
    assert set(plain.by_rule) == {"structure"}, "no name is there to join by"
    assert not plain.is_other_program
    assert plain.groups > 1
    named = api.join_profile(recorded / name / "named.mlir", profile)
    assert named.share >= LEAST
    assert named.by_rule["op-name"] >= 0.9 * named.joined_ns, "names of manual regions lack what is before"


@pytest.mark.parametrize("name", PROGRAMS)
def test_structure_and_names_agree(recorded: Path, name: str) -> None:
    """What structure says of an instruction is among what its names say, for nearly all of the time."""
    profile = _profile(recorded / name)
    by_name = {
        (join.module, join.instruction): set(join.operations)
        for join in api.join_profile(recorded / name / "named.mlir", profile).joins
    }
    plain = api.join_profile(recorded / name / "plain.mlir", profile)
    agreed = sum(
        join.time_ns for join in plain.joins if set(join.operations) & by_name[join.module, join.instruction]
    )
    assert agreed >= 0.95 * plain.time_ns


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("other", PROGRAMS)
def test_another_program_is_refused_and_told(recorded: Path, name: str, other: str) -> None:
    if name == other:
        return
    from hespas.graph import Diagnostics

    found = Diagnostics()
    joined = api.join_profile(recorded / other / "plain.mlir", _profile(recorded / name), diagnostics=found)
    assert joined.share < 0.5
    assert joined.is_other_program
    assert "match.other-program" in found.counts()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("text", ["plain.mlir", "named.mlir"])
def test_a_capture_is_what_ran(recorded: Path, name: str, text: str) -> None:
    done = api.validate_capture(recorded / name / text, recorded / name / "step.xplane.pb").details
    assert done.equal, (done.operations, done.order.violations, done.collectives)
    assert (done.joined, done.by, done.runs) == (1.0, "instruction", 3)
    if name == "collectives_shard_map":
        assert len(done.ranks) == 8
        assert done.captured_collectives == done.measured_collectives == 64
        assert done.captured_bytes == done.measured_bytes > 0
    else:
        assert done.order.checked > 0


def test_a_capture_of_fewer_products_is_not_what_ran(recorded: Path) -> None:
    """Arguments and results of equal sizes: only what is inside tells."""
    folder = recorded / "remat_unrolled"
    text = (folder / "plain.mlir").read_text()
    lines = text.splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if "stablehlo.dot_general" in line)
    name = lines[place].split("=")[0].strip()
    twice = lines[place].replace(name, "%again", 1)
    (folder / "more.mlir").write_text("".join([*lines[: place + 1], twice, *lines[place + 1 :]]))
    done = api.validate_capture(folder / "more.mlir", folder / "step.xplane.pb").details
    products = [each for each in done.operations if each.operation == "dot_general"]
    assert [each.captured - each.measured for each in products] == [1 + _plain_excess(folder)]


def _plain_excess(folder: Path) -> float:
    """Products that the compiler merged in the program as it is."""
    done = api.validate_capture(folder / "plain.mlir", folder / "step.xplane.pb").details
    return sum(each.captured - each.measured for each in done.operations if each.operation == "dot_general")


def test_a_sharded_step_captured_without_devices_is_what_eight_ran(tmp_path: Path) -> None:
    """What Shardy makes of the program for an abstract mesh, and a run of XLA: every byte is the same."""
    name = "llama_fsdp_tp"
    command = [sys.executable, "-m", "benchmarks.joins", "--record", str(tmp_path), name]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    from fixtures.make import llama

    def build(mesh: object) -> object:
        shape = llama.LlamaShape(fsdp=2, tp=4, dtype="float32", batch=8)
        return llama.train_step(shape, mesh), llama.arguments(shape, mesh)

    captured = api.capture(build, mesh={"data": 2, "model": 4}).workload
    done = api.validate_capture(captured, tmp_path / name / "step.xplane.pb").details
    assert done.equal, done.collectives
    assert done.captured_bytes == done.measured_bytes > 1e8
    assert done.combined > 0
    plain = api.join_profile(tmp_path / name / "plain.mlir", tmp_path / name / "step.xplane.pb")
    assert plain.share >= LEAST
    whole = api.validate_capture(tmp_path / name / "plain.mlir", tmp_path / name / "step.xplane.pb").details
    assert not whole.equal
    assert any("not partitioned" in note for note in whole.notes)
