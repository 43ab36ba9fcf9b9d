"""``hespas capture`` as users type it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import invalidate_caches
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner, Result

import hespas
from hespas.cli.main import app
from hespas.graph.errors import UsageError

pytest.importorskip("jax")
MODULE = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

print("importing")


def build(mesh):
    def spec(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))

    def step(w, x, scale=2.0):
        return jnp.sum((x @ w) * scale)

    return step, (spec((64, 128), None, "model"), spec((256, 64), "data", None)), {"scale": 3.0}


@jax.jit
def predict(w, x):
    print("tracing")
    return jax.nn.softmax(x @ w)


def alone():
    x = jax.lax.with_sharding_constraint(jnp.ones((64, 64)), P("data"))
    return (x @ x).sum()


def by_type(x):
    return jax.sharding.reshard(x, P(None, "data")).sum(1)


def arguments(mesh):
    return jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("data", None)))


def wrong(mesh):
    return mesh.nothing


def not_a_step(mesh):
    return 3


def does_not_trace(x):
    return x if x > 0 else -x


def scaled(mesh):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    return (lambda x: jnp.exp(x) @ jnp.ones((64, 64))), (x,)


class Odd(BaseException):
    def __str__(self):
        raise RuntimeError("no text")


def raises_oddly(mesh):
    raise Odd


def ends_a_generator(mesh):
    raise GeneratorExit


def calls_back(mesh):
    def step(x):
        jax.debug.print("{}", x[0])
        return x * 2

    return step, (jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("data"))),)


def alone_on_each(mesh):
    import os

    os.write(1, b"by number\\n")
    os.system("echo by another process")
    print("by name")
    return jnp.tanh, (jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, P("data"))),)


number = 3
"""


MODULES = {
    "train": MODULE,
    "leaves": "import sys\nsys.exit(7)\n",
    "broken": "import nothing_of_this_name\n",
}


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the command is typed, with modules that no other test has loaded."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    invalidate_caches()
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def capture(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["capture", *arguments])


def test_a_step_is_captured_with_all_that_can_be_written_of_it(folder: Path) -> None:
    done = capture(
        "train:build", "--mesh", "data=4,model=2", "--out", "traces", "--json", "-",
        "--program", "step.mlir", "--partitioned", "step.hlo",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "hespas.capture/1"
    assert (document["ranks"], document["classes"], document["mesh"]) == (8, 1, "data=4,model=2")
    sums = [("all_reduce", "model"), ("all_reduce", "data")]
    assert [(row["kind"], row["axes"]) for row in document["collectives"]] == sums
    assert "importing" in done.stderr
    assert len(list((folder / "traces").glob("*.et"))) == 8
    assert "sdy.mesh" in (folder / "step.mlir").read_text(encoding="utf-8")
    assert "num_partitions=8" in (folder / "step.hlo").read_text(encoding="utf-8")
    again = capture("train:build", "--mesh", "data=4,model=2", "--out", "traces")
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr


def test_what_a_program_prints_in_any_way_is_no_part_of_the_answer(folder: Path) -> None:
    command = [sys.executable, "-c", "from hespas.cli.main import main; main()"]
    asked = ["capture", "train:alone_on_each", "--mesh", "data=4", "--json", "-"]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(
        [*command, *asked], capture_output=True, text=True, check=False, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["collectives"] == document["diagnostics"] == []
    assert document["bytes_moved"] == 2 * 16 * 8 * 4
    for way in ("by number", "by another process", "by name"):
        assert way in done.stderr


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        (["train:predict", "--args", "f32[64,128]@-,data; f32[32,64]"], {"all_reduce"}),
        (["train.py:predict", "--args", "f32[64,128]@-,data; f32[32,64]"], {"all_reduce"}),
        (["train:alone"], {"all_reduce", "all_gather"}),
        (["train:by_type", "--args", "arguments", "--explicit", "data"], {"all_to_all", "all_reduce"}),
        (
            ["train:predict", "--args", "f32[64,128]@-,data; f32[32,64]", "--partitioner", "gspmd"],
            {"all_reduce"},
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_functions_and_arguments_in_all_ways(arguments: list[str], kinds: set[str]) -> None:
    done = capture(*arguments, "--mesh", "data=8", "--json", "-")
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout)["collectives"]
    assert {row["kind"] for row in rows} <= kinds
    assert rows


def test_a_program_that_exchanges_nothing_is_run_and_joined_without_a_word(folder: Path) -> None:
    done = capture("train:scaled", "--mesh", "data=2", "--profile", "run")
    assert done.exit_code == 0, done.stderr
    assert "warning" not in done.stderr
    report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
    assert report["is_what_ran"]
    assert report["joined_share"] > 0.98
    assert (report["mesh"], report["steps"]) == ("data=2", 3)


def test_a_mesh_of_jax_and_partial_functions_are_taken_as_they_are() -> None:
    jax: Any = importlib.import_module("jax")
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "model"))
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding)
    before = dict(os.environ)

    def grown(scale: float, x: Any) -> Any:
        return scale * (x @ x)

    done = hespas.capture(partial(grown, 2.0), x, mesh=mesh)
    assert done.workload.name == "jit_grown"
    assert str(done.mesh) == "data=2,model=2"
    assert os.environ == before
    with pytest.raises(UsageError, match="`function=3` is an int"):
        hespas.capture(cast("Any", 3), x, mesh=mesh)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["train:build"], 2, "--mesh"),
        (["train:build", "--mesh", "data"], 2, "is not AXIS=N"),
        (["train:build", "--mesh", "data=3,model=2"], 2, "should evenly divide"),
        (["train:build", "--mesh", "data=4"], 2, "model"),
        (["train", "--mesh", "data=4"], 2, "does not name a function"),
        (["train:nothing", "--mesh", "data=4"], 2, "has no 'nothing'"),
        (["train:number", "--mesh", "data=4"], 2, "int is not a function"),
        (["nowhere:step", "--mesh", "data=4"], 2, "module 'nowhere' does not exist"),
        (["nowhere.py:step", "--mesh", "data=4"], 2, "the file does not exist"),
        (
            ["leaves:step", "--mesh", "data=4"],
            2,
            'if __name__ == "__main__"'.replace('"', "'").split(" ==")[0],
        ),
        (["broken:step", "--mesh", "data=4"], 2, "nothing_of_this_name"),
        (["train:predict", "--mesh", "data=4"], 2, "takes w, x, but their types are not given"),
        (
            ["train:predict", "--mesh", "data=4", "--args", "f32[64,128]@rows"],
            2,
            "but the mesh has the axes data",
        ),
        (["train:predict", "--mesh", "data=4", "--args", "g32[64,128]"], 2, "no number format 'g32'"),
        (["train:predict", "--mesh", "data=4", "--args", "f32[2,3]; f32[2,3]"], 2, "tracing predict fails"),
        (["train:predict", "--mesh", "data=4", "--args", "f32[2,3]; f32[4,2]"], 2, "has a sharding over"),
        (["train:wrong", "--mesh", "data=4"], 2, "train.py:38"),
        (
            ["train:not_a_step", "--mesh", "data=4"],
            2,
            "must return the step and its arguments, but it returns int",
        ),
        (["train:does_not_trace", "--mesh", "data=4", "--args", "f32[]"], 2, "train.py:46"),
        (["train:raises_oddly", "--mesh", "data=4"], 2, "fails: Odd: its message cannot be shown"),
        (["train:ends_a_generator", "--mesh", "data=4"], 2, "ends_a_generator fails: GeneratorExit"),
        (["train:calls_back", "--mesh", "data=4"], 2, "--platform cpu"),
        (["train:alone", "--mesh", "data=4", "--explicit", "rows"], 2, "has no axis rows"),
        (["train:build", "--mesh", "data=4,model=2", "--out", "-"], 2, "a workload consists of files"),
    ],
)
def test_what_cannot_be_captured_is_told_in_a_sentence(
    folder: Path, arguments: list[str], code: int, told: str
) -> None:
    done = capture(*arguments)
    assert done.exit_code == code, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {
        "train.py",
        "leaves.py",
        "broken.py",
    }


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"partitioner": "xla"}, "is not one of 'auto', 'shardy', 'gspmd'"),
        ({"platform": "gpu"}, "is not one of 'cpu', 'cuda', 'rocm', 'tpu'"),
        ({"framework": "tf"}, "is not one of 'auto', 'jax', 'torch'"),
        ({"mesh": {"data": 4.0}}, "`mesh` is a dict"),
        ({"mesh": {"data": "4"}}, "a mapping of a str to an int"),
        ({"function": None}, "`function` is None"),
    ],
)
def test_choices_that_there_are_not_are_told(asked: dict[str, Any], told: str) -> None:
    chosen: dict[str, Any] = {"function": print, "mesh": "data=4", **asked}
    with pytest.raises(UsageError, match=told):
        hespas.capture(**chosen)


@pytest.mark.usefixtures("folder")
def test_captures_in_threads_leave_standard_output_where_it_was() -> None:
    before = sys.stdout
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(hespas.capture, "train:alone_on_each", mesh="data=4") for _ in range(3)]
        told = {each.result().headline() for each in asked}
    assert len(told) == 1
    assert sys.stdout is before
