"""Adapters of array simulators, tested with stubs that check their input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hespas.estimators import load_estimator
from hespas.estimators.external.adapter import CommandError, ExternalSimulator, run_command
from hespas.estimators.external.programs import Cocossim, Onnxim, matmul_model
from hespas.estimators.external.python_packages import ScaleSim, ZigZag
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from hespas.hardware import load_device
from hespas.operations import Labels, Operations
from hespas.operations.build import matmuls
from tests.limits import SAFETY_S

TPU = load_device("TPU-v4")

PYTHON = """#!{python}
import sys
assert sys.argv[1:3] == ["-E", "-c"]
code, arguments = sys.argv[3], sys.argv[4:]
if "importlib" in code:
    print("9.9")
    sys.exit()
open({log!r}, "a").write("run\\n")
{body}
"""
SCALE_SIM = """
config, topology, layout, out = arguments
settings = open(config).read()
for setting in ("ArrayHeight = 16", "ArrayWidth = 8", "Dataflow = os"):
    assert setting in settings.splitlines()
rows = open(topology).read().splitlines()
assert rows[1].endswith(",") and open(layout).read().count("product,") == 1
m, n, k = map(int, rows[1].split(",")[1:4])
import os
os.mkdir(out + "/run")
with open(out + "/run/COMPUTE_REPORT.csv", "w") as report:
    report.write("LayerID, Total Cycles (incl. prefetch), Total Cycles, Stall Cycles,\\n")
    report.write(f"0, 7, {m * n * k - 1}.0, 0,\\n")
"""
ZIGZAG = """
import json
asked = json.load(open(arguments[0]))
(layer,) = asked["workload"]
assert asked["accelerator"].endswith("a.yaml") and asked["lpf_limit"] == 6
d, k, c = layer["loop_sizes"]
json.dump(dict(cycles=d * k * c, energy=1.0), open(arguments[1], "w"))
"""
COCOSSIM = """#!{python}
import sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
open({log!r}, "a").write("run\\n")
assert (options["-sa_sz"], options["-ws"], options["-f"]) == ("128", "1", "0.94"), options
name, m, k, n = open(options["-i"]).read().split()
assert name == "Matmul" and int(m) <= int(n)
{say}
"""
ONNXIM = """#!{python}
import json, os, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
open({log!r}, "a").write("run\\n")
name = json.load(open(options["--models_list"]))["models"][0]["name"]
model = open(os.path.join(os.environ["ONNXIM_HOME"], "models", name, name + ".onnx"), "rb").read()
assert b"MatMul" in model and os.path.exists(os.path.join(os.environ["ONNXIM_HOME"], "configs", "c.json"))
print("[info] Layer product finish at 500")
print("[info] Total compute time 470")
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A line per run of a stub."""
    (tmp_path / "log").touch()
    return tmp_path / "log"


def runs(log: Path) -> int:
    return len(log.read_text().splitlines())


def program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def python(folder: Path, log: Path, body: str) -> str:
    return program(folder, "python", PYTHON.format(python=sys.executable, log=str(log), body=body))


def products(*sizes: tuple[int, int, int], batch: int = 1) -> Operations:
    m, n, k = (np.array(column, np.float64) for column in zip(*sizes, strict=True))
    batches = np.full(len(sizes), float(batch))
    return matmuls(Labels.constant("i8", len(sizes)), batch=batches, m=m, n=n, k=k)


def test_scale_sim_counts_cycles(tmp_path: Path, log: Path) -> None:
    model = ScaleSim(
        command=python(tmp_path, log, SCALE_SIM), cache=str(tmp_path / "kept"), array="16x8", dataflow="os",
        clock_mhz=500.0,
    )  # fmt: skip
    said = model.predict(products((4, 5, 6), (7, 8, 9), (4, 5, 6)), TPU)
    assert said.duration_ns.tolist() == [2.0 * 120, 2.0 * 504, 2.0 * 120]
    assert runs(log) == 2, "equal products are run once"
    assert model.predict(products((7, 8, 9), batch=3), TPU).duration_ns.tolist() == [6.0 * 504]
    assert runs(log) == 2, "and kept"
    replace(model, dataflow="os", buffer_kb=1).predict(products((7, 8, 9)), TPU)
    assert runs(log) == 3, "per settings"
    assert model.available().detail == "scalesim 9.9"


def test_zigzag_searches_on_the_users_accelerator(tmp_path: Path, log: Path) -> None:
    for name in ("a.yaml", "m.yaml"):
        (tmp_path / name).write_text(name)
    model = ZigZag(
        command=python(tmp_path, log, ZIGZAG), cache=str(tmp_path / "kept"), clock_mhz=1000.0,
        accelerator=str(tmp_path / "a.yaml"), mapping=str(tmp_path / "m.yaml"),
    )  # fmt: skip
    assert model.predict(products((2, 3, 4)), TPU).duration_ns.tolist() == [24.0]
    (tmp_path / "a.yaml").write_text("another")
    model.predict(products((2, 3, 4)), TPU)
    assert runs(log) == 2, "another accelerator under the same name is another question"
    with pytest.raises(UsageError, match="no accelerator or no mapping is given"):
        replace(model, mapping="").predict(products((2, 3, 4)), TPU)
    with pytest.raises(FormatError, match=r"none.yaml: No such file"):
        replace(model, mapping=str(tmp_path / "none.yaml")).predict(products((2, 3, 4)), TPU)


@pytest.mark.parametrize(
    ("say", "duration_ns"),
    [
        ("print('Time: 12.5 us')", 12_500.0),
        ("open(options['-o'], 'w').write('Cycles 940\\n')", 1000.0),
    ],
)
def test_cocossim_tells_a_time_or_cycles(tmp_path: Path, log: Path, say: str, duration_ns: float) -> None:
    command = program(tmp_path, "perf", COCOSSIM.format(python=sys.executable, log=str(log), say=say))
    model = Cocossim(command=command, cache=str(tmp_path / "kept"), clock_mhz=940.0)
    said = model.predict(products((300, 20, 10), (20, 300, 10)), TPU)
    assert said.duration_ns.tolist() == pytest.approx([duration_ns] * 2)


def test_onnxim_runs_the_users_configuration(tmp_path: Path, log: Path) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"core_freq": 940, "num_cores": 1}))
    command = program(tmp_path, "Simulator", ONNXIM.format(python=sys.executable, log=str(log)))
    model = Onnxim(command=command, cache=str(tmp_path / "kept"), config=str(config))
    assert model.predict(products((2, 3, 4)), TPU).duration_ns.tolist() == [500.0]
    with pytest.raises(UsageError, match="no configuration is given"):
        replace(model, config="").predict(products((2, 3, 4)), TPU)
    config.write_text("{}")
    with pytest.raises(UsageError, match="has no core_freq"):
        model.predict(products((2, 3, 4)), TPU)


def failing(tmp_path: Path, log: Path, body: str, timeout_s: float = SAFETY_S) -> ScaleSim:
    return ScaleSim(
        command=python(tmp_path, log, body), cache=str(tmp_path / "kept"), timeout_s=timeout_s, clock_mhz=1.0
    )


FAILURES = {
    "exit status 3: no such array": "print('no such array'); sys.exit(3)",
    "no COMPUTE_REPORT.csv was written": "print('done')",
    "states no total cycles": "open(arguments[3] + '/COMPUTE_REPORT.csv', 'w').write('nonsense')",
    "the output of the simulator states no time": (
        "open(arguments[3] + '/COMPUTE_REPORT.csv', 'w').write('LayerID, Total Cycles,\\n0, nan,\\n')"
    ),
    "no result within 3 s": "import time; time.sleep(60)",
}


@pytest.mark.parametrize("message", FAILURES)
def test_a_failure_is_an_error_and_never_a_time(tmp_path: Path, log: Path, message: str) -> None:
    model = failing(tmp_path, log, FAILURES[message], 3.0 if "within" in message else SAFETY_S)
    with pytest.raises(UnsupportedError, match=f"failed on a matmul of 2x3x4 of 8 bits: .*{message}"):
        model.predict(products((2, 3, 4)), TPU)
    found = Diagnostics()
    said = replace(model, failed="unknown").predict(products((2, 3, 4)), TPU, found)
    assert np.isnan(said.duration_ns).all()
    assert said.estimator.tolist() == [-1]
    assert found.counts() == {"scalesim.failed": 1}
    assert runs(log) == 2, "failures are not kept"


def test_what_is_no_product_is_told(tmp_path: Path, log: Path) -> None:
    found = Diagnostics()
    ops = replace(products((2, 3, 4)), kind=Labels.constant("vector", 1), op=Labels.constant("tanh", 1))
    assert np.isnan(failing(tmp_path, log, "").predict(ops, TPU, found).duration_ns).all()
    assert [(each.code, "tanh" in each.message) for each in found] == [("scalesim.not-a-product", True)]
    assert runs(log) == 0


ABSENT: dict[str, tuple[ExternalSimulator, str]] = {
    "scalesim": (ScaleSim(command="/no/python"), "pip install scalesim"),
    "zigzag": (ZigZag(command="/no/python"), "pip install zigzag-dse six"),
    "cocossim": (Cocossim(command="/no/perf_model"), "build COCOSSim"),
    "onnxim": (Onnxim(command="/no/Simulator"), "build ONNXim"),
}


@pytest.mark.parametrize("name", ABSENT)
def test_an_absent_simulator_says_what_to_install(name: str) -> None:
    model, install = ABSENT[name]
    there = model.available()
    assert not there.is_available
    assert there.install.startswith(install)
    with pytest.raises(UnsupportedError) as caught:
        model.predict(products((2, 3, 4)), TPU)
    assert caught.value.hint == there.install
    assert load_estimator(name).name == name


@pytest.mark.parametrize(
    "spelling",
    [
        "scalesim:array=16",
        "scalesim:dataflow=xs",
        "cocossim:dataflow=is",
        "zigzag:lpf_limit=0",
        "onnxim:failed=no",
    ],
)
def test_wrong_options_are_refused(spelling: str) -> None:
    with pytest.raises(UsageError):
        load_estimator(spelling)


def test_arrays_and_clocks_have_to_be_known(tmp_path: Path, log: Path) -> None:
    gpu, model = load_device("H100-SXM"), failing(tmp_path, log, SCALE_SIM)
    with pytest.raises(UsageError, match="H100-SXM states no systolic array"):
        model.predict(products((2, 3, 4)), gpu)
    with pytest.raises(UsageError, match="states no clock"):
        replace(model, array="16x8", dataflow="os", clock_mhz=0.0).predict(products((2, 3, 4)), gpu)


def test_all_that_a_program_started_ends_with_it(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', CHILD]).wait()"
    child = "import time, pathlib; time.sleep(1.5); pathlib.Path('late').touch()"
    with pytest.raises(CommandError, match="no result within"):
        run_command([sys.executable, "-c", f"CHILD = {child!r}\n{script}"], tmp_path, 0.7)
    run_command([sys.executable, "-c", "import time; time.sleep(1.5)"], tmp_path, SAFETY_S)
    assert not (tmp_path / "late").exists()


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and contents of a protobuf message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = varint()
        size = varint()
        if tag & 7 == 0:
            yield tag >> 3, size
        else:
            yield tag >> 3, data[at : at + size]
            at += size


def part(data: bytes, number: int) -> bytes:
    return next(value for found, value in fields(data) if found == number and isinstance(value, bytes))


def test_the_onnx_model_is_one_product() -> None:
    graph = part(matmul_model(300, 5, 70_000), 7)
    assert part(part(graph, 1), 4) == b"MatMul"
    assert [value for number, value in fields(part(graph, 5)) if number == 1] == [70_000, 5]
    shape = part(part(part(part(graph, 11), 2), 1), 2)
    assert [next(fields(extent))[1] for _, extent in fields(shape) if isinstance(extent, bytes)] == [
        300,
        70_000,
    ]
