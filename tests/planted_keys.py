"""Programs and paths planted in every key of files that name estimators, devices, systems, models or sources.

As a script: run the commands of a JSON list on standard input under an audit hook, each in its folder. Print
for each its exit code, its output, and every event of the hook that leaves the folder or starts a program.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, cast

import click
import typer
from click.testing import CliRunner

__all__ = ["ROOT", "Case", "Outcome", "as_input", "plant"]

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "fixtures"
SECRETS = ("/etc/passwd", "/proc/self/environ")
OWN_CHILD = "hespas.files.sandbox"
"""In the command of the process that native parsers run in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command on files with one planted text; ``position`` and ``option`` are in its refusal (empty: the
    command may succeed).
    """

    name: str
    folder: str
    command: str
    arguments: tuple[str, ...]
    position: str = ""
    option: str = ""


class Outcome(NamedTuple):
    """The end of a command: ``events`` are those that must not be."""

    exit_code: int
    output: str
    events: list[str]


# Estimators: each option of each that is registered, and each that runs programs.

_SIMULATORS: Mapping[str, str] = {
    "scalesim": "command={run},array=8x8,clock_mhz=940",
    "cocossim": "command={run},array=8x8,clock_mhz=940",
    "onnxim": "command={run},config={file}",
    "zigzag": "command={run},accelerator={file},mapping={file},clock_mhz=940",
}


def _estimators(run: str, file: str) -> Iterator[str]:
    """Yield spellings that name ``run`` as a program or ``file`` as a file."""
    from hespas.estimators.registry import estimator_factory, estimator_names

    for name in estimator_names():
        factory = cast("type", estimator_factory(name))
        inert: frozenset[str] | None = getattr(factory, "inert_options", None)
        if inert is None:
            yield name
        options = fields(factory) if is_dataclass(factory) else ()
        for option in (each.name for each in options if isinstance(each.default, str)):
            if inert is None or option not in inert:
                yield f"{name}:{option}={file}"
        if name in _SIMULATORS:
            yield f"{name}:{_SIMULATORS[name].format(run=run, file=file)}"
    yield f"composite:order=scalesim:command={run}+roofline"
    yield f"training:base=scalesim:command={run}"


# Paths: out of the folder in every way, by kind of file.


def _paths(outside: Path, name: str) -> dict[str, str]:
    return {
        "absolute": str(outside / name),
        "above": f"../outside/{name}",
        "around": f"sub/../../outside/{name}",
        "link": f"./link-{name}",
        "linked folder": f"linked/{name}",
        "passwords": SECRETS[0],
        "environment": SECRETS[1],
    }


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


_GRID = {"source": '"w.mlir"', "hardware": '"TPU-v4"', "estimator": '"roofline"'}
_ASTRA = {"mode": '"astra"', "system_config": '"system.json"', "network_config": '"network.yml"'}
_TRAINED: Mapping[str, str] = {
    "source": "here", "framework": "MaxText", "accelerator": "TPU-v5e", "num_accelerators": "8",
    "model": "Llama-3-8B", "seq_len": "2048", "global_batch": "8", "micro_batch": "1", "dp": "8", "tp": "1",
    "pp": "1", "precision": "bf16", "step_time_ms": "1500", "network": "", "power_limit_w": "200",
}  # fmt: skip
_SERVED: Mapping[str, str] = {
    "model_path": "meta-llama/Llama-3.1-8B-Instruct", "system": "h100_sxm", "backend": "vllm", "mode": "agg",
    "isl": "64", "osl": "8", "tp_size": "1", "batch_size": "1", "silicon_ttft_ms": "9",
    "silicon_tpot_ms": "9",
}  # fmt: skip
_RECORDED: Mapping[str, str] = {
    "trace": "t", "accelerator": "H100-SXM", "model": "Llama-3.1-8B", "engine": "vLLM 0.19.0", "tp": "1",
    "precision": "bf16", "max_num_seqs": "8", "max_num_batched_tokens": "512", "num_kv_tokens": "10000",
}  # fmt: skip
_REQUESTS = """trace,queued_s,first_token_s,last_token_s,input_tokens,output_tokens
t,0,1,2,64,9
t,1,2,3,64,9
"""
_OPERATIONS: Mapping[str, str] = {
    "hardware": "H100-SXM", "kind": "matmul", "dtype": "bf16", "m": "64", "n": "64", "k": "64",
    "duration_us": "5",
}  # fmt: skip


def _toml(keys: Mapping[str, str]) -> str:
    return "".join(f"{key} = {value}\n" for key, value in keys.items())


def _csv(cells: Mapping[str, str]) -> str:
    return f"{','.join(cells)}\n{','.join(cells.values())}\n"


@dataclass(slots=True)
class _Planter:
    """Builder of a folder for each case, with its files and links out of the folder."""

    top: Path
    cases: list[Case]

    @property
    def outside(self) -> Path:
        return self.top / "outside"

    def folder(self) -> Path:
        folder = self.top / f"case-{len(self.cases)}"
        folder.mkdir()
        for name in ("w.mlir", "system.json", "network.yml", "run.sh"):
            os.link(self.outside / name, folder / name)
        for path in self.outside.iterdir():
            (folder / f"link-{path.name}").symlink_to(path)
        (folder / "linked").symlink_to(self.outside)
        (folder / "sub").mkdir()
        return folder

    def add(self, name: str, folder: Path, *words: str, position: str = "", option: str = "") -> None:
        case = Case(
            name=name,
            folder=str(folder),
            command=words[0],
            arguments=words[1:],
            position=position,
            option=option,
        )
        self.cases.append(case)

    def grids(self) -> None:
        simulate = ("main", "simulate", "--grid", "g.toml")
        files = {
            "source": "w.mlir", "hardware": "device.toml", "system": "system.toml",
            "system_config": "system.json", "network_config": "network.yml", "memory_config": "memory.json",
        }  # fmt: skip
        for key, name in files.items():
            for how, path in _paths(self.outside, name).items():
                keys = {**_GRID, **(_ASTRA if key.endswith("_config") else {}), key: f'["{path}"]'}
                folder = self.folder()
                _write(folder, "g.toml", _toml(keys))
                self.add(f"grid {key} {how}", folder, *simulate, position=f"{key}[0]")
        folder = self.folder()
        (folder / "traces").mkdir()
        (folder / "traces" / "x.0.et").symlink_to(self.outside / "w.mlir")
        _write(folder, "g.toml", _toml({**_GRID, "source": '"traces"'}))
        self.add("grid source folder of links", folder, *simulate, position="source")
        for spelling in self.estimators():
            folder = self.folder()
            _write(folder, "g.toml", _toml({**_GRID, "estimator": json.dumps(spelling)}))
            self.add(f"grid {spelling}", folder, *simulate, position="estimator", option="--allow-programs")

    def estimators(self) -> list[str]:
        outside = str(self.outside / "run.sh")
        there = [f"{name}:{text.format(run=outside, file=outside)}" for name, text in _SIMULATORS.items()]
        return [*_estimators("./run.sh", "w.mlir"), *there, f"database:path={outside}"]

    def orders(self) -> None:
        simulate = ("main", "simulate", "w.mlir", "--hardware", "TPU-v4")
        convert = ("convert", "w.mlir", "o.json", "--hardware", "TPU-v4")
        for place, spelling in enumerate(self.estimators()):
            folder = self.folder()
            key = ("order", "kinds.matmul")[place % 2]
            _write(folder, "order.toml", _toml({"order": '["roofline"]', key: json.dumps([spelling])}))
            self.add(
                f"order {key} {spelling}",
                folder,
                *(simulate, convert)[place // 2 % 2],
                "--estimator",
                "composite:path=order.toml",
                position=key,
                option="--allow-programs",
            )

    def trained(self) -> None:
        commands = {
            "league": ("validate", "league", "--table", "t.csv", "--jobs", "1", "--estimator", "roofline"),
            "row": ("main", "generate", "llm", "--row", "t.csv:0", "--out", "o.json"),
        }
        files = {"accelerator": "device.toml", "network": "system.toml", "model": "model.toml"}
        plants = [
            (column, how, path)
            for column, name in files.items()
            for how, path in _paths(self.outside, name).items()
        ]
        for what, words in commands.items():
            for column, how, path in plants:
                folder = self.folder()
                _write(folder, "t.csv", _csv({**_TRAINED, column: path}))
                is_name = column == "model" or (what == "row" and column == "network")
                position = "" if is_name else f"column {column}"
                self.add(f"{what} {column} {how}", folder, *words, position=position)
            folder = self.folder()
            _write(folder, "t.csv", _csv({**_TRAINED, "model": "mine"}))
            (folder / "models.csv").symlink_to(self.outside / "models.csv")
            self.add(f"{what} models.csv", folder, *words, position="models.csv")

    def served(self) -> None:
        serving = ("validate", "serving")
        for column, name in (("system", "device.toml"), ("model_path", "model.toml")):
            for how, path in _paths(self.outside, name).items():
                folder = self.folder()
                _write(folder, "t.csv", _csv({**_SERVED, column: path}))
                self.add(f"serving {column} {how}", folder, *serving, "--table", "t.csv")
        for column, name in (("accelerator", "device.toml"), ("model", "model.toml")):
            for how, path in _paths(self.outside, name).items():
                folder = self.folder()
                _write(folder, "t.csv", _csv({**_RECORDED, column: path}))
                _write(folder, "r.csv", _REQUESTS)
                self.add(f"recorded {column} {how}", folder, *serving, "--recorded", "t.csv", "r.csv")

    def operations(self) -> None:
        commands = (
            ("validate", "accuracy", "--table", "t.csv", "--estimator", "roofline"),
            ("main", "estimate", "--table", "t.csv", "--hardware", "H100-SXM", "--estimator", "roofline"),
            ("validate", "calibrate", "--hardware", "H100-SXM", "--table", "t.csv", "--out", "o.toml"),
        )
        paths = _paths(self.outside, "device.toml")
        for how in ("absolute", "link"):
            for words in commands:
                folder = self.folder()
                _write(folder, "t.csv", _csv({**_OPERATIONS, "hardware": paths[how]}))
                self.add(f"operations {words[1]} {how}", folder, *words)

    def devices(self) -> None:
        estimate = ("main", "estimate", "w.mlir", "--hardware", "d.toml")
        device = (self.outside / "device.toml").read_text()
        system = (self.outside / "system.toml").read_text()
        without_device = re.sub("^device = .*\n", "", system, flags=re.MULTILINE)
        for how, path in _paths(self.outside, "card.json").items():
            card = path if path.endswith(".json") else f"{path}.json"
            folder = self.folder()
            _write(folder, "d.toml", f'learned_models = ["{card}"]\n{device}')
            self.add(f"device learned_models {how}", folder, *estimate, position="learned_models[0]")
        folder = self.folder()
        _write(folder, "card.json", "{}")
        (folder / "card.npz").symlink_to(self.outside / "card.npz")
        _write(folder, "d.toml", f'learned_models = ["card.json"]\n{device}')
        self.add("device trees", folder, *estimate, position="learned_models[0]")
        for how, path in _paths(self.outside, "device.toml").items():
            folder = self.folder()
            _write(folder, "d.toml", f'fits_of = "{path}"\n{device}')
            self.add(f"device fits_of {how}", folder, *estimate, position="fits_of")
            folder = self.folder()
            _write(folder, "s.toml", f'device = "{path}"\n{without_device}')
            self.add(
                f"system device {how}", folder, "main", "hardware", "system", "s.toml", position="device"
            )

    def graphs(self) -> None:
        for how, path in _paths(self.outside, "device.toml").items():
            folder = self.folder()
            metadata = dict.fromkeys(("hespas.estimated_on", "source", "device"), path)
            nodes = [{"op": "add", "deps": list[int]()}]
            graph = {"schema": "hespas.op-graph/1", "metadata": metadata, "nodes": nodes}
            _write(folder, "w.json", json.dumps(graph))
            self.add(f"op-graph metadata {how}", folder, "main", "simulate", "w.json")


def plant(top: Path) -> list[Case]:
    """Make the files of all cases below ``top``."""
    from hespas.hardware import device_to_toml, load_device, load_system, system_to_toml

    outside = top / "outside"
    outside.mkdir()
    _write(outside, "run.sh", f"#!/bin/sh\ntouch '{top}/ran'\n").chmod(0o755)
    _write(outside, "w.mlir", (FIXTURES / "stablehlo" / "mlp.mlir").read_text())
    _write(outside, "device.toml", device_to_toml(load_device("TPU-v5e")))
    _write(outside, "system.toml", system_to_toml(load_system("tpu-v5e")))
    for name in ("system.json", "network.yml", "remote_memory.json"):
        text = (FIXTURES / "astra_sim" / name).read_text()
        _write(outside, name.removeprefix("remote_"), text)
    sizes = "layers = 2\nhidden = 64\nffn = 64\nheads = 2\nvocab = 64\n"
    _write(outside, "model.toml", f'name = "mine"\n{sizes}')
    _write(outside, "models.csv", "model,layers,hidden,ffn,heads,vocab\nmine,2,1024,4096,8,1000\n")
    _write(outside, "card.json", "{}")
    _write(outside, "card.npz", "")
    made = _Planter(top, [])
    made.grids()
    made.orders()
    made.trained()
    made.served()
    made.operations()
    made.devices()
    made.graphs()
    return made.cases


# The child.


@dataclass(slots=True)
class _Watch:
    """Audit hook that records opened files outside the folder, started programs, and connections."""

    outside: str
    events: list[str]

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            self._opened(arguments[0])
        elif event in {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "socket.connect"}:
            text = f"{event} {arguments!r}"
            if OWN_CHILD not in text:
                self.events.append(text)

    def _opened(self, path: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        with suppress(OSError, ValueError):
            name = os.fsdecode(cast("str", path))
            real = os.path.realpath(name)
            if real.startswith(self.outside + os.sep) or name in SECRETS or real in SECRETS:
                self.events.append(f"open {name}")


@cache
def _command(name: str) -> click.Command:
    return cast("click.Command", typer.main.get_command(import_module(f"hespas.cli.{name}").app))


def main() -> None:
    """Run the cases."""
    stated = json.load(sys.stdin)
    watch = _Watch(os.path.realpath(stated["outside"]), [])
    sys.addaudithook(watch)
    outcomes: list[Outcome] = []
    for case in stated["cases"]:
        os.chdir(case["folder"])
        watch.events.clear()
        done = CliRunner().invoke(_command(case["command"]), case["arguments"])
        outcomes.append(Outcome(done.exit_code, done.output, list(watch.events)))
    json.dump(outcomes, sys.stdout)


def as_input(outside: Path, cases: list[Case]) -> str:
    """Return the standard input of the child."""
    return json.dumps({"outside": str(outside), "cases": [asdict(case) for case in cases]})


if __name__ == "__main__":
    main()
