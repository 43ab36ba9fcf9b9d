"""Modules and programs that shadow those of the package are planted in the current folder, the folder of the
input and the temporary folder. None of them runs, for every command and estimator that starts a process.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import SAFETY_S

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "fixtures"
SHADOWED = (
    *("numpy", "dataclasses", "jaxlib", "json", "ctypes", "select", "socket", "pickle", "importlib", "site"),
    *("multiprocessing", "tempfile", "msgspec", "jax", "scalesim", "zigzag", "sitecustomize", "ml_dtypes"),
    *("threading", "subprocess", "signal", "typing", "functools", "pathlib", "encodings", "random"),
    *("usercustomize", "scipy", "pyarrow", "pandas", "iree"),
)
PROGRAMS = ("Simulator", "perf_model", "python", "python3")
FOLDERS = ("here", "inputs", "temporary")
SCRIPT = "from {module} import main\nif __name__ == '__main__': main()\n"
MODULES = {"hespas": "main", "hespas-convert": "convert", "hespas-validate": "validate"}


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """Three folders: the current one, that of the inputs, the temporary one. What is planted in each leaves a
    file ``ran-FOLDER-NAME`` above them.
    """
    for where in FOLDERS:
        folder = tmp_path / where
        (folder / "hespas").mkdir(parents=True)
        for name in (*SHADOWED, "hespas/__init__"):
            leaves = tmp_path / f"ran-{where}-{name.partition('/')[0]}"
            (folder / f"{name}.py").write_text(f"open({str(leaves)!r}, 'w').close()\n")
        for name in PROGRAMS:
            (folder / name).write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran-{where}-{name}'\n")
            (folder / name).chmod(0o755)
    inputs = tmp_path / "inputs"
    shutil.copy(FIXTURES / "stablehlo" / "mlp.mlir", inputs / "m.mlir")
    shutil.copy(FIXTURES / "stablehlo" / "pipeline_ring.mlir", inputs / "n.mlir")
    shutil.copy(FIXTURES / "binary" / "llama_fsdp_tp_local_N8.mlirbc", inputs / "m.mlirbc")
    shutil.copy(FIXTURES / "profiles" / "tpu_v4_megacore.xplane.pb", inputs / "p.xplane.pb")
    packed = FIXTURES / "binary" / "llama_fsdp_tp_global_N8.hlo.pb.gz"
    (inputs / "a.pb").write_bytes(gzip.decompress(packed.read_bytes()))
    (inputs / "a.yaml").write_text("{}")
    return tmp_path


def run(trap: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command as its entry point starts it: a script in a folder of its own. ``{in}`` is the folder of the
    inputs; simulators are looked for in libraries of the user.
    """
    script = trap / "bin" / command
    script.parent.mkdir(exist_ok=True)
    script.write_text(SCRIPT.format(module=f"hespas.cli.{MODULES[command]}"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(trap / "temporary"))
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(trap / "libraries")])
    environment["XDG_CACHE_HOME"] = str(trap / "cache")
    words = [word.replace("{in}", str(trap / "inputs")) for word in arguments]
    return subprocess.run(
        [sys.executable, str(script), *words],
        cwd=trap / "here", env=environment, capture_output=True, text=True, check=False, timeout=SAFETY_S,
    )  # fmt: skip


def planted_that_ran(trap: Path) -> list[str]:
    return sorted(path.name for path in trap.glob("ran-*"))


@pytest.mark.parametrize("where", FOLDERS)
def test_what_is_planted_would_be_found(where: str, trap: Path) -> None:
    script = "import random, dataclasses"
    subprocess.run([sys.executable, "-c", script], cwd=trap / where, check=False, capture_output=True)
    subprocess.run([trap / where / "Simulator"], check=True)
    assert {f"ran-{where}-random", f"ran-{where}-Simulator"} <= set(planted_that_ran(trap))


ON_H100 = ("--hardware", "H100-SXM")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("hespas", ["view", "{in}/m.mlir"]),
        ("hespas", ["view", "{in}/m.mlirbc"]),
        ("hespas", ["view", "{in}/a.pb"]),
        ("hespas", ["estimate", "{in}/m.mlir", *ON_H100]),
        ("hespas", ["simulate", "{in}/m.mlir", *ON_H100, "--timeline", "t.json"]),
        ("hespas", ["analyze", "{in}/p.xplane.pb", "--report", "report"]),
        ("hespas", ["estimators"]),
        ("hespas-convert", ["{in}/m.mlir", "m.json"]),
        ("hespas-convert", ["{in}/m.mlirbc", "replay.mlir"]),
        ("hespas-validate", ["check", "{in}/m.mlirbc"]),
        ("hespas-validate", ["roundtrip", "{in}/m.mlir", "{in}/n.mlir", "--formats", "op-graph"]),
    ],
    ids=lambda words: words if isinstance(words, str) else " ".join(words),
)
def test_commands(command: str, arguments: list[str], trap: Path) -> None:
    done = run(trap, command, *arguments)
    assert planted_that_ran(trap) == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [("accuracy",), ("calibrate", "--out", "out.toml")], ids=" ".join)
def test_the_program_that_ran(words: tuple[str, ...], trap: Path) -> None:
    measured = ("--measured", "{in}/p.xplane.pb", "--hardware", "TPU-v4")
    done = run(trap, "hespas-validate", *words, *measured, "--workload", "{in}/m.mlir")
    assert planted_that_ran(trap) == []
    assert (done.returncode, "events do not match the program" in done.stderr) == (2, True), done.stderr


def estimated(trap: Path, estimator: str) -> subprocess.CompletedProcess[str]:
    return run(trap, "hespas", "estimate", "{in}/m.mlir", *ON_H100, "--estimator", estimator)


def test_the_compiling_estimator(trap: Path) -> None:
    pytest.importorskip("jax")
    done = estimated(trap, "xla:repeats=2")
    assert planted_that_ran(trap) == []
    assert done.returncode == 0, done.stderr


def installed(trap: Path, package: str, distribution: str, *modules: str) -> Path:
    """A package of the user's; the file that says that it was imported."""
    folder, imported = trap / "libraries" / package, trap / f"imported-{package}"
    folder.mkdir(parents=True)
    for module in ("__init__", *modules):
        (folder / f"{module}.py").write_text(f"open({str(imported)!r}, 'w').close()\n")
    told = trap / "libraries" / f"{distribution.replace('-', '_')}-9.9.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 9.9\n")
    return imported


SCALE_SIM = "scalesim:array=8x8,clock_mhz=940"
ZIGZAG = "zigzag:accelerator={in}/a.yaml,mapping={in}/a.yaml,clock_mhz=940"


@pytest.mark.parametrize(
    ("package", "distribution", "modules", "estimator"),
    [
        ("iree", "iree-base-compiler", ("compiler", "runtime"), "iree"),
        ("scalesim", "scalesim", ("scale_sim",), SCALE_SIM),
        ("zigzag", "zigzag-dse", ("api",), ZIGZAG),
    ],
    ids=["iree", "scalesim", "zigzag"],
)
def test_estimators_of_other_packages(
    package: str, distribution: str, modules: tuple[str, ...], estimator: str, trap: Path
) -> None:
    imported = installed(trap, package, distribution, *modules)
    done = estimated(trap, estimator)
    assert planted_that_ran(trap) == []
    assert imported.exists(), done.stderr


@pytest.mark.parametrize("estimator", [SCALE_SIM, ZIGZAG], ids=["scalesim", "zigzag"])
def test_simulators_in_another_python(estimator: str, trap: Path) -> None:
    done = estimated(trap, f"{estimator},command={sys.executable}")
    assert planted_that_ran(trap) == []
    assert (done.returncode, estimator.partition(":")[0] in done.stderr) == (4, True), done.stderr


@pytest.mark.parametrize("estimator", ["onnxim:config={in}/a.yaml", "cocossim:array=8x8,clock_mhz=940"])
@pytest.mark.parametrize("is_named", [True, False])
def test_simulators_that_are_programs(estimator: str, is_named: bool, trap: Path) -> None:
    program = trap / "own" / "simulator"
    program.parent.mkdir()
    # What it runs by name is looked for where the user looks for programs.
    program.write_text(f"#!/bin/sh\ntouch '{trap}/asked'\nexec python3 -P -c 'import random'\n")
    program.chmod(0o755)
    done = estimated(trap, f"{estimator},command={program}" if is_named else estimator)
    assert planted_that_ran(trap) == []
    assert (trap / "asked").exists() == is_named, done.stderr
