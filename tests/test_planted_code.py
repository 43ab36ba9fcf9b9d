"""Nothing that lies in the current folder, beside the input or in the temporary folder ever runs: modules
that shadow what the package imports are planted there, for every command and estimator that starts a process.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "fixtures"
SHADOWED = (
    *("numpy", "dataclasses", "jaxlib", "json", "ctypes", "select", "socket", "pickle", "importlib", "site"),
    *("multiprocessing", "tempfile", "msgspec", "jax", "scalesim", "zigzag", "sitecustomize", "ml_dtypes"),
    *("threading", "subprocess", "signal", "typing", "functools", "pathlib", "encodings", "random"),
    *("usercustomize", "scipy", "pyarrow", "pandas"),
)
SCRIPT = "from {module} import main\nif __name__ == '__main__': main()\n"
MODULES = {"hespas": "main", "hespas-convert": "convert", "hespas-validate": "validate"}


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder of inputs with planted modules; each leaves a file ``ran-NAME`` in the folder above."""
    folder = tmp_path / "trap"
    (folder / "hespas").mkdir(parents=True)
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran-')!r} + {name!r}, 'w').close()\n")
    (folder / "hespas" / "__init__.py").write_text(f"open({str(tmp_path / 'ran-hespas')!r}, 'w').close()\n")
    shutil.copy(FIXTURES / "stablehlo" / "mlp.mlir", folder / "m.mlir")
    shutil.copy(FIXTURES / "stablehlo" / "pipeline_ring.mlir", folder / "n.mlir")
    return folder


def run(trap: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command as its entry point starts it: a script in a folder of its own."""
    script = trap.parent / "bin" / command
    script.parent.mkdir()
    module = f"hespas.cli.{MODULES[command]}"
    script.write_text(SCRIPT.format(module=module))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    temporary = {"TMPDIR": str(trap), "TEMP": str(trap), "TMP": str(trap), "PYTHONPATH": str(ROOT)}
    cache = {"XDG_CACHE_HOME": str(trap.parent / "cache")}
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=trap, env={**environment, **temporary, **cache}, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip


def planted_that_ran(trap: Path) -> list[str]:
    return sorted(path.name for path in trap.parent.glob("ran-*"))


def test_the_planted_modules_would_be_found(trap: Path) -> None:
    script = "import random, dataclasses"
    subprocess.run([sys.executable, "-c", script], cwd=trap, check=False, capture_output=True)
    assert planted_that_ran(trap)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("hespas", ["view", "m.mlir"]),
        ("hespas", ["view", "m.mlirbc"]),
        ("hespas", ["view", "a.pb"]),
        ("hespas", ["estimate", "m.mlir", "--hardware", "H100-SXM"]),
        ("hespas", ["simulate", "m.mlir", "--hardware", "H100-SXM"]),
        ("hespas-convert", ["m.mlir", "m.json"]),
        ("hespas-convert", ["m.mlirbc", "replay.mlir"]),
        ("hespas-validate", ["check", "m.mlirbc"]),
        (
            "hespas-validate",
            ["roundtrip", "m.mlir", "n.mlir", "--jobs", "2", "--formats", "op-graph"],
        ),
    ],
    ids=" ".join,
)
def test_commands(command: str, arguments: list[str], trap: Path) -> None:
    shutil.copy(FIXTURES / "binary" / "llama_fsdp_tp_local_N8.mlirbc", trap / "m.mlirbc")
    packed = FIXTURES / "binary" / "llama_fsdp_tp_global_N8.hlo.pb.gz"
    (trap / "a.pb").write_bytes(gzip.decompress(packed.read_bytes()))
    done = run(trap, command, *arguments)
    assert planted_that_ran(trap) == []
    assert done.returncode == 0, done.stderr


def test_the_compiling_estimator(trap: Path) -> None:
    pytest.importorskip("jax")
    done = run(trap, "hespas", "estimate", "m.mlir", "--hardware", "H100-SXM", "--estimator", "xla:repeats=2")
    assert planted_that_ran(trap) == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("estimator", ["scalesim", "zigzag"])
def test_simulators_in_another_python(estimator: str, trap: Path) -> None:
    given = f"{estimator}:command={sys.executable}"
    done = run(trap, "hespas", "estimate", "m.mlir", "--hardware", "TPU-v4", "--estimator", given)
    assert planted_that_ran(trap) == []
    assert done.returncode in {0, 4}, done.stderr
    assert done.returncode == 0 or f"{estimator}" in done.stderr
