"""Programs that read files, by name: their valid inputs, and the stages of an input."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, cast

import numpy as np
import pandas as pd
from typer.testing import CliRunner

from hespas import api
from hespas.cli.main import app as hespas_app
from hespas.cli.validate import app as validate_app
from hespas.converters import ReadOptions
from hespas.converters.stablehlo.mlir import load_bindings
from hespas.estimators.learned import Learned
from hespas.estimators.learned.ensemble import Forest
from hespas.estimators.learned.serialization import (
    LearnedModel,
    forget_models,
    load_model,
    model_bytes,
    shipped_folder,
)
from hespas.graph import Workload
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from hespas.hardware import Device, load_device, write_device
from hespas.measurements import read_measurements
from hespas.operations import Labels, build
from hespas.validators.accuracy import compare_reports
from hespas.validators.checker import CheckOptions, check_workload
from tests.converters.pytorch.test_pytorch_linked import CALLS, DEVICE, HOST, OPERATIONS, pair
from tests.fuzzing.commands import command_files, league_tables, model_files, request_logs
from tests.fuzzing.mutate import Input
from tests.fuzzing.seeds import FIXTURES, READERS, seeds_of
from tests.fuzzing.stages import DEVICES, ESTIMATORS, Judged, on_value
from tests.validators.small_tables import HEADER, products, vectors

__all__ = ["SUBJECTS", "Subject", "seeds", "warm_up"]


class _Arrow(Protocol):
    """The part of pyarrow that is used here."""

    def system_memory_pool(self) -> object: ...
    def set_memory_pool(self, pool: object) -> None: ...


Stages = Callable[[Judged, Path, int], None]
"""What is done with the input in a folder; its number says what of that which takes turns."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A kind of input; ``make_seeds`` makes valid inputs, ``stages`` does with an input what users do."""

    name: str
    make_seeds: Callable[[], Sequence[Input]]
    stages: Stages


def _reader(name: str) -> Subject:
    reader = READERS[name]
    file = f"input{reader.suffix}"

    def stages(judged: Judged, folder: Path, number: int) -> None:
        on_value(judged, folder / file, reader.format, number)

    return Subject(name, lambda: tuple({file: seed} for seed in seeds_of(name)), stages)


_RANK_FILES = (
    ("stablehlo/hand_mesh_groups.mlir", range(8)),
    ("stablehlo/hand_collectives.mlir", range(2)),
    ("stablehlo/hand_async.mlir", range(2)),
    ("hlo/hand_groups.hlo.txt", range(3)),
)
"""Programs, and the ranks of which there is a file; each file is read, so few ranks make for many inputs."""


def _rank_files() -> tuple[Input, ...]:
    """A folder of Chakra traces with the groups of its collectives."""
    made: list[Input] = []
    for program, ranks in _RANK_FILES:
        with TemporaryDirectory() as scratch:
            place = Path(scratch) / "x"
            api.convert(FIXTURES / program, place, target_format="chakra", ranks=ranks)
            made.append({path.name: path.read_bytes() for path in place.iterdir()})
    return tuple(made)


def _set_of(form: str) -> Stages:
    """Files of one folder, read together."""

    def stages(judged: Judged, folder: Path, number: int) -> None:
        on_value(judged, folder, form, number)

    return stages


# --- learned models


def _small_models() -> tuple[Input, ...]:
    return tuple(_small_model(name) for name in ("gemm-tpu", "vector-tpu", "gemm-aiter"))


def _small_model(name: str) -> Input:
    """A shipped model of a few trees."""
    model = load_model(shipped_folder() / f"{name}.json")
    forests = {key: _few_trees(forest, 3) for key, forest in model.forests.items()}
    card, trees = model_bytes(LearnedModel(model.card, forests, model.octaves[:40]))
    return {"m.json": card, "m.npz": trees}


def _few_trees(forest: Forest, trees: int) -> Forest:
    nodes, leaves = int(forest.node_offsets[trees]), int(forest.leaf_offsets[trees])
    return replace(
        forest,
        column=forest.column[:nodes],
        split=forest.split[:nodes],
        first=forest.first[:nodes],
        last=forest.last[:nodes],
        node_offsets=forest.node_offsets[: trees + 1],
        leaf=forest.leaf[:leaves],
        leaf_offsets=forest.leaf_offsets[: trees + 1],
    )


def _ask_models(judged: Judged, folder: Path, number: int) -> None:
    """Times of a few operations, by the folder and by a device that names the model."""
    forget_models()
    scheme = Labels.constant(("bf16", "f16", "f32")[number % 3], 2)
    size = np.array([64.0, 4096.0])
    ops = build.matmuls(scheme, batch=np.ones(2), m=size, n=size, k=size)
    device = load_device(("TPU-v4", "MI300X")[number % 2])
    judged.attempt(
        "predict", lambda: Learned(models=str(folder)).predict(ops, device), (FormatError,), str(folder)
    )
    if number % 2:
        forget_models()
        named = replace(device, learned_models=(str(folder / "m.json"),))
        judged.attempt(
            "composite", lambda: api.estimate(_program(), _file_of(named, judged), estimator="composite")
        )
    forget_models()


def _file_of(device: Device, judged: Judged) -> str:
    return str(write_device(device, judged.place() / "device.toml"))


@cache
def _program() -> Workload:
    """A small program to be estimated."""
    found = api.read(FIXTURES / "stablehlo/mlp.mlir")
    if not isinstance(found, Workload):
        raise TypeError("the fixture is a program")
    return found


# --- devices


def _device_files() -> tuple[Input, ...]:
    rooms = Path(api.__file__).parents[1] / "hardware"
    names = ("data/H100-SXM.toml", "data/TPU-v4.toml", "data/MI300X.toml", "data/A40.toml")
    plain = [{"device.toml": (rooms / name).read_bytes()} for name in names]
    with TemporaryDirectory() as scratch:
        fitted = replace(load_device("A40"), own_fits=load_device("TPU-v4").fits[:4])
        whole = write_device(fitted, Path(scratch) / "x.toml").read_bytes()
    return (*plain, {"device.toml": whole})


def _use_device(judged: Judged, folder: Path, number: int) -> None:
    path = str(folder / "device.toml")
    device = judged.attempt("load", lambda: load_device(path), (FormatError, UnsupportedError), path)
    if device is None:
        return
    estimator = ESTIMATORS[number % len(ESTIMATORS)]
    judged.attempt(f"estimate {estimator}", lambda: api.estimate(_program(), path, estimator=estimator))
    match number % 3:
        case 0:
            judged.attempt("written, not read", lambda: _device_again(device, judged))
        case 1:
            judged.command("hardware show", hespas_app, "hardware", "show", path)
        case _:
            judged.attempt("simulate", lambda: api.simulate(_program(), path, estimator=estimator))


def _device_again(device: Device, judged: Judged) -> None:
    if repr(load_device(_file_of(device, judged))) != repr(device):  # NaN is not equal to itself
        raise ValueError("a device that is written comes back otherwise")


# --- configurations of ASTRA-sim

_SYSTEM = b"""{"scheduling-policy": "LIFO", "endpoint-delay": 10, "active-chunks-per-dimension": 1,
"preferred-dataset-splits": 4, "local-mem-bw": 1600, "roofline-enabled": 1, "peak-perf": 312,
"all-reduce-implementation": ["ring", "halvingDoubling"], "all-gather-implementation": ["ring", "direct3"],
"reduce-scatter-implementation": ["ring", "oneRing"], "all-to-all-implementation": ["direct", "ring"],
"all-reduce-implementation-custom": ["x"]}"""
_NETWORK = b"""topology: [ Ring, Switch ]
npus_count: [ 4, 2 ]
bandwidth: [ 50.0, 100.0 ]  # GB/s
latency: [ 500.0, 1e3 ]
"""


def _configurations() -> tuple[Input, ...]:
    kinds = ("NO_MEMORY_EXPANSION", "PER_NPU_MEMORY_EXPANSION", "MEMORY_POOL")
    return tuple(
        {
            "system.json": _SYSTEM,
            "network.yml": _NETWORK,
            "memory.json": f'{{"memory-type": "{kind}", "remote-mem-bw": 10.5}}'.encode(),
        }
        for kind in kinds
    )


@cache
def _job() -> Workload:
    found = api.read(FIXTURES / "stablehlo/hand_collectives.mlir", options=ReadOptions(num_devices=8))
    if not isinstance(found, Workload):
        raise TypeError("the fixture is a program")
    return found


def _check_with(judged: Judged, folder: Path, number: int) -> None:
    options = CheckOptions(
        system_config=folder / "system.json",
        network_config=folder / "network.yml",
        memory_config=folder / "memory.json",
        backend=("unaware", "aware", None)[number % 3],
    )
    judged.attempt("check", lambda: check_workload(_job(), "astra-sim", options), (FormatError,), str(folder))


# --- tables of operations

_KINDS = b"""hardware,kind,op,dtype,batch,q_len,kv_len,window,heads,kv_heads,head_dim,images,in_channels,\
out_channels,kernel,in_size,out_size,latency_us,latency_us_std
H100-SXM,attention.context,,bf16,2,128,128,,8,4,64,,,,,,,10,0.5
H100-SXM,attention.generation,,bf16,2,1,512,,8,4,64,,,,,,,5,
TPU-v4,attention.encoder,,bf16,2,128,128,,8,,64,,,,,,,7,0.1
H100-SXM,convolution,,f32,,,,,,,,16,64,128,3,56,28,20,1
"""
_LAYERS = b"""Layer,IFMAP Height,IFMAP Width,Filter Height,Filter Width,Channels,Num Filter,Strides
a,9,9,3,3,3,4,1
b,18,9,3,3,3,8,2
"""
_PRODUCTS = b"Layer,M,N,K\na,128,256,512\nb,64,32,16\n"
_PLAIN = b"m,n,k,dtype\n128,256,512,bf16\n64,32,16,f32\n"


def _product_us(flops: float, moved: float) -> float:
    return flops / 5e8 + moved / 2e6 + 5


def _stream_us(flops: float, moved: float) -> float:
    return flops / 1e9 + moved / 1.5e6 + 3


def _tables() -> tuple[Input, ...]:
    rows = products("H100-SXM", _product_us, (256, 512))
    rows += vectors("H100-SXM", ("add", "relu"), _stream_us)[:30]
    rows += products("A100-SXM-80GB", _product_us, (256, 512))
    text = ("\n".join([HEADER, *rows]) + "\n").encode()
    return tuple({"t.csv": data} for data in (text, text, _KINDS, _LAYERS, _PRODUCTS, _PLAIN))


def _parquet_tables() -> tuple[Input, ...]:
    made: list[Input] = []
    for each in _tables():
        out = io.BytesIO()
        pd.read_csv(io.BytesIO(each["t.csv"])).to_parquet(out)
        made.append({"t.parquet": out.getvalue()})
    return tuple(made)


def _use_table(name: str) -> Stages:
    def stages(judged: Judged, folder: Path, number: int) -> None:
        path, place = folder / name, judged.place()
        judged.attempt(
            "asked",
            lambda: api.estimate_table(path, DEVICES[number % len(DEVICES)], estimator="roofline"),
            (FormatError,),
            str(path),
        )
        judged.attempt("measured", lambda: read_measurements(path), (FormatError,), str(path))
        shared: list[str | Path] = ["--table", path, "--json", place / "figures.json"]
        shared += ["--hardware", "H100-SXM"]
        match number % 32:
            case 31:
                calibrated: list[str | Path] = ["--out", place / "x.toml", "--no-progress"]
                judged.command("calibrate", validate_app, "calibrate", *shared, *calibrated)
            case 1 | 9 | 17:
                judged.command("accuracy", validate_app, "accuracy", *shared, "--no-progress")
            case 2 | 4 | 6 | 10 | 12 | 18 | 20 | 22 | 26 | 28:
                spelled = f"database:path={path}"
                judged.attempt("database", lambda: api.estimate(_program(), "H100-SXM", estimator=spelled))
            case _:
                estimator = ESTIMATORS[number // 32 % len(ESTIMATORS)]
                options: list[str | Path] = ["--out", place / "x.csv", "--estimator", estimator]
                judged.command(f"estimate {estimator}", hespas_app, "estimate", *shared, *options)

    return stages


# --- reports


def _reports() -> tuple[Input, ...]:
    with TemporaryDirectory() as scratch:
        table = Path(scratch) / "t.csv"
        table.write_text("\n".join([HEADER, *products("H100-SXM", _product_us, (256, 512))]) + "\n")
        made: list[bytes] = []
        for estimator in ("roofline", "calibrated"):
            file = Path(scratch) / f"{estimator}.json"
            arguments = ["accuracy", "--table", str(table), "--estimator", estimator, "--json", str(file)]
            CliRunner().invoke(validate_app, arguments, catch_exceptions=False)
            made.append(file.read_bytes())
    return ({"base.json": made[0], "new.json": made[0]}, {"base.json": made[1], "new.json": made[1]})


def _compare_reports(judged: Judged, folder: Path, number: int) -> None:
    base, new = folder / "base.json", folder / "new.json"
    judged.attempt("compare", lambda: compare_reports(base, new), (FormatError, UsageError), str(folder))
    limit = ["--max-regression", "0.1"] if number % 2 else []
    out: list[str | Path] = ["--json", judged.place() / "x.json"]
    judged.command("compare command", validate_app, "compare", base, new, *limit, *out)


def _orders() -> tuple[Input, ...]:
    kinds = b'[kinds]\nmatmul = ["systolic", "roofline"]\nvector = ["roofline"]\n'
    return ({"order.toml": b'order = ["calibrated", "roofline"]\n' + kinds},)


def _use_order(judged: Judged, folder: Path, number: int) -> None:
    spelled = f"composite:path={folder / 'order.toml'}"
    device = DEVICES[number % len(DEVICES)]
    judged.attempt("composite", lambda: api.estimate(_program(), device, estimator=spelled))


def _pytorch_sets() -> tuple[Input, ...]:
    """A rank of PyTorch: what ran on the host and what its devices recorded, joined."""
    with TemporaryDirectory() as scratch:
        folder = pair(Path(scratch), OPERATIONS, [*HOST, *CALLS, *DEVICE])
        return ({path.name: path.read_bytes() for path in folder.iterdir()},)


_Made = tuple[Sequence[Input], Stages]


def _of_commands(name: str, make: Callable[[], _Made]) -> Subject:
    """Return a subject whose inputs are given to commands."""

    def stages(judged: Judged, folder: Path, number: int) -> None:
        make()[1](judged, folder, number)

    return Subject(name, lambda: make()[0], stages)


_SUBJECTS = (
    *map(_reader, READERS),
    Subject("rank-files", _rank_files, _set_of("chakra")),
    Subject("pytorch", _pytorch_sets, _set_of("pytorch")),
    Subject("learned-model", _small_models, _ask_models),
    Subject("device", _device_files, _use_device),
    Subject("configuration", _configurations, _check_with),
    Subject("table", _tables, _use_table("t.csv")),
    Subject("table-parquet", _parquet_tables, _use_table("t.parquet")),
    Subject("report", _reports, _compare_reports),
    Subject("estimator-order", _orders, _use_order),
    _of_commands("commands", cache(command_files)),
    _of_commands("league", cache(league_tables)),
    _of_commands("requests", cache(request_logs)),
    _of_commands("model", cache(model_files)),
)

SUBJECTS: Mapping[str, Subject] = {subject.name: subject for subject in _SUBJECTS}
"""Readers first, then all else that is read."""


@cache
def seeds(name: str) -> tuple[Input, ...]:
    """Sound inputs of a subject."""
    return tuple(SUBJECTS[name].make_seeds())


@cache
def warm_up(subject: Subject) -> None:
    """Load what is loaded once and takes time and memory, so that no input is charged with it."""
    import_module("scipy.optimize")
    load_bindings()
    # Arrow's own reserves a gigabyte of address space at first.
    arrow = cast("_Arrow", import_module("pyarrow"))
    arrow.set_memory_pool(arrow.system_memory_pool())
    with TemporaryDirectory() as scratch:
        place = Path(scratch) / "in"
        place.mkdir()
        for files in [*subject.make_seeds()][:1]:
            for name, data in files.items():
                (place / name).write_bytes(data)
            for number in range(_TURNS):
                subject.stages(Judged(_GENEROUS_BYTES, Path(scratch) / "out"), place, number)


_TURNS = 6
"""Of what takes turns the rest loads little."""
_GENEROUS_BYTES = 10 << 20
"""A size that leaves time enough for imports."""
