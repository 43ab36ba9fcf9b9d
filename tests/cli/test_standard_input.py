"""Standard input as ``-`` in every command, ``python -m hespas``, and the handlers of signals afterwards."""

from __future__ import annotations

import gzip
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from hespas._version import __version__
from hespas.cli.convert import app as convert_app
from hespas.cli.main import app as hespas_app
from hespas.cli.validate import app as validate_app

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
PROGRAM = FIXTURES / "stablehlo" / "mlp.mlir"
PROFILE = FIXTURES / "profiles" / "ffn_train_rank0of2.pt.trace.json.gz"
DEVICE = ROOT / "hespas" / "hardware" / "data" / "H100-SXM.toml"
TABLE = b"hardware,kind,dtype,m,n,k,duration_us\n" + b"H100-SXM,matmul,bf16,512,512,512,9\n" * 3
RUNS = b"model,accelerator,num_accelerators,seq_len,global_batch\nllama-3-8b,H100-SXM,8,2048,8\n"


def run(app: Typer, source: bytes, *words: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, words)], input=source)


@pytest.mark.parametrize(
    ("app", "source", "words"),
    [
        (hespas_app, PROGRAM, ("estimate", "-", "--hardware", "H100-SXM")),
        (hespas_app, TABLE, ("estimate", "--table", "-", "--hardware", "H100-SXM")),
        (hespas_app, PROGRAM, ("simulate", "-", "--hardware", "H100-SXM")),
        (hespas_app, PROGRAM, ("view", "-")),
        (hespas_app, PROFILE, ("view", "-")),
        (hespas_app, PROFILE, ("analyze", "-")),
        (hespas_app, DEVICE, ("hardware", "show", "-")),
        (validate_app, PROGRAM, ("check", "-")),
        (validate_app, PROGRAM, ("roundtrip", "-", "--format", "op-graph")),
        (validate_app, PROFILE, ("accuracy", "--measured", "-", "--hardware", "H100-SXM")),
        (validate_app, TABLE, ("accuracy", "--table", "-", "--hardware", "H100-SXM")),
        (validate_app, PROFILE, ("capture", "-", PROFILE)),
    ],
)
def test_a_stream_is_read_as_a_file_is(
    app: Typer, source: Path | bytes, words: tuple[str | Path, ...], tmp_path: Path
) -> None:
    """The same answer, but for what the input is called."""
    data = source if isinstance(source, bytes) else source.read_bytes()
    suffixes = ".csv" if isinstance(source, bytes) else "".join(source.suffixes)
    path = tmp_path / f"input{suffixes}"
    path.write_bytes(data)
    streamed = run(app, data, *words)
    filed = run(app, b"", *(path if word == "-" else word for word in words))
    assert streamed.exit_code == filed.exit_code, streamed.output
    assert "no such file" not in streamed.output.lower()
    stem = path.name.removesuffix(".json.gz")  # what a profile without a name is called
    named = filed.stdout.replace(str(path), "-").replace(path.name, "-").replace(stem, "-")
    assert streamed.stdout.split()[-20:] == named.split()[-20:]


@pytest.mark.parametrize(
    ("app", "words", "message"),
    [
        (validate_app, ("league", "--table", "-"), "error: -: "),
        (validate_app, ("serving", "--table", "-"), "error: -: "),
        (validate_app, ("compare", "-", PROGRAM), "error: -: expected an accuracy report"),
        (
            validate_app,
            ("calibrate", "--table", "-", "--hardware", "L4", "--out", "x.toml"),
            "error: -: ",
        ),
        (hespas_app, ("serve", "llama-3-8b", "--hardware", "H100-SXM", "--requests", "-"), "error: -: "),
        (hespas_app, ("view", "-"), "error: -: no known format"),
        (hespas_app, ("hardware", "show", "-"), "error: -: "),
    ],
)
def test_what_a_stream_holds_is_reported_by_the_name_of_the_stream(
    app: Typer, words: tuple[str | Path, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(app, b"\0\1\2 nothing of ours", *words)
    assert done.exit_code in {2, 3}, done.output
    assert message in done.stderr
    assert "no such file" not in done.stderr.lower()


def test_a_parquet_table_comes_through_a_stream(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    head, row, *_ = TABLE.decode().splitlines()
    frame = pd.DataFrame([row.split(",")], columns=head.split(","))
    frame.to_parquet(tmp_path / "t.parquet")
    data = (tmp_path / "t.parquet").read_bytes()
    done = run(hespas_app, data, "estimate", "--table", "-", "--hardware", "H100-SXM")
    assert done.exit_code == 0, done.output


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hespas", "--version"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"hespas {__version__}\n"), done.stderr


@pytest.fixture(params=["SIGTERM", "SIGINT", "SIGHUP"])
def handled(request: pytest.FixtureRequest) -> Generator[tuple[int, Callable[..., None]]]:
    """A signal with a handler of the process that runs commands."""
    number: int = getattr(signal, request.param)

    def mine(*_: object) -> None:
        raise AssertionError("not sent")

    before = signal.signal(number, mine)
    yield number, mine
    signal.signal(number, before)


@pytest.mark.parametrize(
    ("app", "words", "code"),
    [
        (hespas_app, ("view", PROGRAM), 0),
        (hespas_app, ("view", "absent.mlir"), 3),
        (convert_app, (PROGRAM, "absent/x.et"), 2),
        (validate_app, ("check", PROGRAM), 0),
    ],
)
def test_handlers_of_signals_are_put_back(
    handled: tuple[int, Callable[..., None]], app: Typer, words: tuple[str | Path, ...], code: int
) -> None:
    number, mine = handled
    assert run(app, b"", *words).exit_code == code
    assert signal.getsignal(number) is mine


def test_a_long_stream_of_zeros_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hespas.api import documents

    monkeypatch.setattr(documents, "_HEAD_BYTES", 1 << 20)
    done = run(hespas_app, bytes(3 << 20), "view", "-")
    assert done.exit_code == 3
    assert "error: -: no known format fits this input" in done.stderr


def test_a_gzipped_program_comes_through_a_stream() -> None:
    done = run(hespas_app, gzip.compress(PROGRAM.read_bytes()), "view", "-")
    assert done.exit_code == 0, done.output
