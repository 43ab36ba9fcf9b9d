"""A changed file given to each command that takes files, in this process: whatever it is, a command ends with
a message and an exit code of 0 to 4, in bounded time and memory.

The other subjects give a command what a reader has accepted. Here the format is detected, as it is for users,
and commands meet files that are not theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from hespas.cli.convert import app as convert_app
from hespas.cli.main import app as hespas_app
from hespas.cli.validate import app as validate_app
from tests.fuzzing.mutate import Input
from tests.fuzzing.seeds import FIXTURES, READERS, seeds_of
from tests.fuzzing.stages import DEVICES, ESTIMATORS, Judged

__all__ = ["COMMANDS", "command_files", "league_tables", "model_files", "request_logs"]

_Words = list[str | Path]
_Line = tuple[typer.Typer, _Words]

_TARGETS = ("x.et", "x.json", "x.arrow", "x.mlir", "x.csv", "x.pftrace")
_PAIRS = ("op-graph,chakra", "op-graph-arrow,chakra-json", "chrome-trace,perfetto", "ops-table,perfetto")
_SOUND = FIXTURES / "profiles" / "h100_streams.xplane.pb"
_PROGRAM = FIXTURES / "stablehlo" / "mlp.mlir"


def _device(turn: int) -> _Words:
    estimator = ESTIMATORS[turn // 4 % len(ESTIMATORS)]
    return ["--hardware", DEVICES[turn % len(DEVICES)], "--estimator", estimator]


def _convert(path: Path, out: Path, turn: int) -> _Line:
    return convert_app, [path, out / _TARGETS[turn % len(_TARGETS)], "--ranks", "0"]


def _view(path: Path, out: Path, turn: int) -> _Line:
    del turn
    return hespas_app, ["view", path, "--json", out / "x.json", "--no-progress"]


def _estimate(path: Path, out: Path, turn: int) -> _Line:
    return hespas_app, ["estimate", path, *_device(turn), "--out", out / "x.csv", "--no-progress"]


def _simulate(path: Path, out: Path, turn: int) -> _Line:
    words: _Words = [
        "simulate",
        path,
        "--json",
        out / "x.json",
        "--timeline",
        out / "t.json",
        "--no-progress",
    ]
    return hespas_app, [*words, *(_device(turn) if turn % 2 else [])]


def _analyze(path: Path, out: Path, turn: int) -> _Line:
    baseline: _Words = ["--baseline", _SOUND] if turn % 2 else ["--report", out / "report"]
    return hespas_app, ["analyze", path, *baseline, "--json", out / "x.json", "--no-progress"]


def _baseline(path: Path, out: Path, turn: int) -> _Line:
    del turn
    return hespas_app, ["analyze", _SOUND, "--baseline", path, "--json", out / "x.json", "--no-progress"]


def _check(path: Path, out: Path, turn: int) -> _Line:
    rules = ((), ("--profile", "chakra"), ("--profile", "astra-sim"))
    return validate_app, ["check", path, *rules[turn % 3], "--json", out / "x.json"]


def _roundtrip(path: Path, out: Path, turn: int) -> _Line:
    words: _Words = ["roundtrip", path, "--jobs", "1", "--formats", _PAIRS[turn % len(_PAIRS)]]
    return validate_app, [*words, "--json", out / "x.json", "--html", out / "x.html", "--no-progress"]


def _accuracy(path: Path, out: Path, turn: int) -> _Line:
    measured: _Words = ["--measured", _SOUND, "--workload", path] if turn % 4 == 1 else ["--measured", path]
    words: _Words = ["accuracy", *measured, *_device(turn), "--no-progress"]
    return validate_app, [*words, "--json", out / "x.json", "--report", out / "report"]


def _compare(path: Path, out: Path, turn: int) -> _Line:
    pair = (path, path) if turn % 2 else (_PROGRAM, path)
    return validate_app, ["compare", *pair, "--json", out / "x.json"]


def _league(path: Path, out: Path, turn: int) -> _Line:
    del turn
    words: _Words = ["league", "--table", path, "--jobs", "1", "--no-progress"]
    return validate_app, [*words, "--json", out / "x.json", "--report", out / "report"]


def _serve_log(path: Path, out: Path, turn: int) -> _Line:
    stack = ("vllm", "sglang", "trtllm")[turn % 3]
    words: _Words = ["serve", "Llama-3.2-1B", "--hardware", "H100-SXM", "--requests", path, "--stack", stack]
    return hespas_app, [*words, "--out", out / "x.csv", "--json", out / "x.json", "--no-progress"]


def _serve_model(path: Path, out: Path, turn: int) -> _Line:
    words: _Words = [
        "serve",
        path,
        "--hardware",
        DEVICES[turn % 2],
        "--json",
        out / "x.json",
        "--no-progress",
    ]
    return hespas_app, [*words, "--requests", "poisson:rate=4,prompt=64,output=8,requests=20"]


COMMANDS: dict[str, Callable[[Path, Path, int], _Line]] = {
    "convert": _convert,
    "view": _view,
    "estimate": _estimate,
    "simulate": _simulate,
    "analyze": _analyze,
    "baseline": _baseline,
    "check": _check,
    "roundtrip": _roundtrip,
    "accuracy": _accuracy,
    "compare": _compare,
    "league": _league,
    "serve log": _serve_log,
    "serve model": _serve_model,
}
"""Words of a command for a file, a folder to write to, and the number of its turn."""

_OF_PROGRAMS = tuple(
    name for name in COMMANDS if name not in {"compare", "league", "serve log", "serve model"}
)
_STRANGERS = 10
"""Every so many files are given to a command of other files."""


def _run(judged: Judged, name: str, path: Path, turn: int) -> None:
    place = judged.place()
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    app, words = COMMANDS[name](path, place, turn)
    judged.command(name, app, *words)
    judged.answer = judged.answer or "failure"


def _file_of(folder: Path) -> Path:
    (path,) = folder.glob("input.*")
    return path


def command_files() -> tuple[tuple[Input, ...], Callable[[Judged, Path, int], None]]:
    """Return the two smallest files of every reader, and what gives them to all commands in turn."""
    inputs = tuple(
        {f"input{reader.suffix}": data} for name, reader in READERS.items() for data in seeds_of(name)[:2]
    )

    def stages(judged: Judged, folder: Path, number: int) -> None:
        turn = number // len(_OF_PROGRAMS)
        name = _OF_PROGRAMS[number % len(_OF_PROGRAMS)]
        if number % _STRANGERS == _STRANGERS - 1:
            name = list(COMMANDS)[turn % len(COMMANDS)]
        _run(judged, name, _file_of(folder), turn)

    return inputs, stages


def _always(*names: str) -> Callable[[Judged, Path, int], None]:
    def stages(judged: Judged, folder: Path, number: int) -> None:
        _run(judged, names[number % len(names)], _file_of(folder), number // len(names))

    return stages


_RUNS = b"""source,framework,accelerator,num_accelerators,model,seq_len,global_batch,micro_batch,dp,tp,pp,vp,\
cp,fsdp,recompute,precision,precision_class,step_time_ms,mfu_pct,memory_gib
here,MaxText,TPU-v5e,8,mine,2048,8,1,8,1,1,1,1,fsdp,remat_policy full,bf16,16bit,1500,40,
here,Megatron-LM,H100-SXM,8,mine,2048,16,1,2,2,2,1,1,,none,bf16,16bit,150,,20
"""
_MODELS = b"model,layers,hidden,ffn,heads,vocab\nmine,2,256,1024,8,1000\n"
_LOG = b"arrival_s,prompt_tokens,output_tokens\n0,100,20\n0.5,64,8\n0.6,1000,3\n9,5,70\n"
_AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n0.1,300,12\n0.4,7,1\n"
_LINES = b'{"arrival_s": 0, "prompt_tokens": 50, "output_tokens": 9}\n{"arrival_s": 2, "prompt_tokens": 1, \
"output_tokens": 40}\n'
_DENSE = b"""name = "mine"
hidden = 256
layers = 4
heads = 8
kv_heads = 2
ffn = "round_up(8 * hidden / 3, 64)"
vocab = 1000
"""
_SPARSE = b"""name = "sparse"
hidden = 512
layers = 3
vocab = 2000
heads = 16
q_lora = 64
kv_lora = 32
nope_dim = 32
rope_dim = 16
v_dim = 32
ffn = 1024
experts = 8
topk = 2
moe_ffn = 128
shared_ffn = 256
dense_layers = 1
"""


_STEP_BYTES = 1_500_000
"""A row asks for a step of a whole model, of up to 2,000 layers: it may take what a file of this size may."""


def league_tables() -> tuple[Sequence[Input], Callable[[Judged, Path, int], None]]:
    """Return tables of published runs with their models, and the league."""
    league = _always("league")

    def stages(judged: Judged, folder: Path, number: int) -> None:
        judged.size = max(judged.size, _STEP_BYTES)
        league(judged, folder, number)

    return ({"input.csv": _RUNS, "models.csv": _MODELS},), stages


def request_logs() -> tuple[Sequence[Input], Callable[[Judged, Path, int], None]]:
    """Return logs of requests, and a server that answers them."""
    inputs = ({"input.jsonl": _LINES}, {"input.csv": _LOG}, {"input.csv": _AZURE})
    return inputs, _always("serve log")


def model_files() -> tuple[Sequence[Input], Callable[[Judged, Path, int], None]]:
    """Return models of a user, and a server of them."""
    return ({"input.toml": _DENSE}, {"input.toml": _SPARSE}), _always("serve model")
