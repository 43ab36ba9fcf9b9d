"""``hespas mcp``: tools with the options of the commands, and the files that they may use."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from typer.testing import CliRunner

import hespas
from hespas.cli.main import app
from hespas.cli.mcp import Requests, ToolSettings, tool_server
from hespas.graph.hints import options_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    shutil.copy(ROOT / "fixtures" / "stablehlo" / "mlp.mlir", inputs)
    (tmp_path / "outputs").mkdir()
    return inputs


class ImmediateRequests(Requests):
    def run(self, work: Callable[[], Any]) -> Any:
        return work()


def server_of(folder: Path, *, writes: bool = False) -> Any:
    settings = ToolSettings([folder], folder.parent / "outputs" if writes else None)
    return tool_server(settings, ImmediateRequests())


def answer(server: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    done: Any = asyncio.run(server.call_tool(tool, arguments))
    content: dict[str, Any] = json.loads(done.content[0].text)
    return content


def refusal(server: Any, tool: str, **arguments: Any) -> str:
    with pytest.raises(Exception, match="Error executing tool") as caught:
        asyncio.run(server.call_tool(tool, arguments))
    return str(caught.value)


def schemas(server: Any) -> dict[str, Mapping[str, Any]]:
    return {tool.name: tool.input_schema for tool in asyncio.run(server.list_tools())}


def test_answers_equal_those_of_the_functions(folder: Path) -> None:
    server, program = server_of(folder), folder / "mlp.mlir"
    done = answer(server, "simulate", source="mlp.mlir", hardware="H100-SXM")
    assert done["figures"]["step_ns"] == hespas.simulate(program, "H100-SXM").step_ns
    rows = answer(server, "estimate", source="mlp.mlir", hardware="H100-SXM", rows=2)
    assert rows["rows_in_all"] == len(hespas.estimate(program, "H100-SXM").table())
    assert len(rows["rows"]) == 2
    assert any("matmul f32 on TF32" in line for line in rows["diagnostics"])
    names = [row["device"] for row in answer(server, "list_devices", rows=1000)["rows"]]
    assert names == list(hespas.list_devices().columns["device"])


def test_arguments_are_the_options(folder: Path) -> None:
    server = server_of(folder)
    properties = schemas(server)["simulate"]["properties"]
    withheld = {"astra_bin", "astra_timeout", "memory_snapshot", "simulator", "timeline"}
    offered = set(options_of(hespas.simulate)) - withheld
    assert set(properties) == offered | {"rows"}
    assert properties["granularity"]["anyOf"][0]["enum"] == ["op", "fused", "region"]
    assert schemas(server)["estimate"]["required"] == ["source", "hardware"]
    assert refusal(server, "simulate", source="mlp.mlir", jitter="much")


def test_a_model_without_a_file(folder: Path) -> None:
    done = answer(server_of(folder), "generate_llm", model="llama-3-8b", dp=8, hardware="H100-SXM")
    expected = hespas.generate(hespas.llm_step("llama-3-8b", dp=8), hardware="H100-SXM")
    assert expected.step is not None
    assert done["figures"]["step"]["step_ns"] == expected.step.step_ns
    assert done["figures"]["fits"] == expected.fits


@pytest.mark.parametrize("name", ["../secret.mlir", "/etc/hostname", "link.mlir"])
def test_files_outside_of_the_folders(folder: Path, name: str) -> None:
    shutil.copy(folder / "mlp.mlir", folder.parent / "secret.mlir")
    (folder / "link.mlir").symlink_to(folder.parent / "secret.mlir")
    server = server_of(folder, writes=True)
    assert "is not in a folder of this server" in refusal(server, "view", source=name)
    device = f"{name}.toml"
    assert "is not in a folder of this server" in refusal(
        server, "estimate", source="mlp.mlir", hardware=device if name != "link.mlir" else "../x.toml"
    )


def test_files_are_written_with_permission_only(folder: Path) -> None:
    arguments_by_tool = schemas(server_of(folder))
    assert "convert" not in arguments_by_tool
    assert "destination" not in arguments_by_tool["generate_llm"]["properties"]
    server = server_of(folder, writes=True)
    answer(server, "convert", source="mlp.mlir", destination="traces", hardware="H100-SXM")
    assert (folder.parent / "outputs" / "traces" / "traces.0.et").exists()
    assert answer(server, "simulate", source="traces")["figures"]["step_ns"] > 0
    assert "is not in" in refusal(server, "convert", source="mlp.mlir", destination="../inputs/step.json")
    assert "exists already" in refusal(server, "convert", source="mlp.mlir", destination="traces")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["inputs", "outputs"]


def test_estimators_that_run_programs_or_read_files(folder: Path) -> None:
    server = server_of(folder)
    for estimator in ("xla", "database:path=mlp.mlir", "onnxim:binary=sh"):
        text = refusal(server, "estimate", source="mlp.mlir", hardware="H100-SXM", estimator=estimator)
        assert "runs programs or reads files, which tools may not" in text
    assert answer(server, "estimate", source="mlp.mlir", hardware="H100-SXM", estimator="roofline")


@pytest.mark.parametrize("text", ["", "a\0b", "x" * 5000])
def test_texts_that_are_not_paths(folder: Path, text: str) -> None:
    server = server_of(folder, writes=True)
    for tool, name in (("view", "source"), ("convert", "destination")):
        given = {"source": "mlp.mlir", "destination": "copy.json"} if tool == "convert" else {}
        error = refusal(server, tool, **given | {name: text})
        assert "internal error" not in error
        assert error.count("\n") >= 1  # a hint


def test_an_empty_text_is_an_option_that_is_not_given(folder: Path) -> None:
    server = server_of(folder)
    given = {"source": "mlp.mlir", "hardware": "H100-SXM"}
    empty: dict[str, Any] = {"format": "", "comm_groups": "", "system": "", "dims": []}
    assert answer(server, "simulate", **given, **empty) == answer(server, "simulate", **given)


def test_unknown_and_missing_arguments(folder: Path) -> None:
    server = server_of(folder)
    given = {"source": "mlp.mlir", "hardware": "H100-SXM"}
    assert "simulator" in refusal(server, "simulate", **given, simulator="astra-sim")
    assert "overwrite" in refusal(server, "simulate", **given, overwrite=True)
    assert "source" in refusal(server, "simulate", hardware="H100-SXM")
    assert "model" in refusal(server, "generate_llm", hardware="H100-SXM")


def test_a_folder_with_a_link_to_other_folders(folder: Path) -> None:
    hespas.convert(folder / "mlp.mlir", folder.parent / "secret.0.et", hardware="H100-SXM")
    (folder / "job").mkdir()
    link = folder / "job" / "step.0.et"
    link.symlink_to(folder.parent / "secret.0.et")
    assert "leads out of the folders that may be read" in refusal(server_of(folder), "view", source="job")
    link.unlink()
    (folder.parent / "secret.0.et").rename(folder / "public.0.et")
    link.symlink_to(folder / "public.0.et")
    assert answer(server_of(folder), "view", source="job")["figures"]["format"] == "chakra"


def test_errors_that_are_not_of_hespas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> str:
        def raising(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr("hespas.cli.mcp._answer", raising)
        return refusal(server_of(folder), "view", source="mlp.mlir")

    assert "internal error: TypeError: wrong" in fail(TypeError("wrong"))
    assert "needs more memory than is available" in fail(MemoryError())
    unreadable = PermissionError(13, "Permission denied", str(folder / "mlp.mlir"))
    assert f"{folder}/mlp.mlir: Permission denied" in fail(unreadable)


def over_standard_streams(folder: Path, calls: int, *options: str) -> list[Any]:
    async def session() -> list[Any]:
        words = ["-m", "hespas", "mcp", str(folder), *options]
        parameters = StdioServerParameters(command=sys.executable, args=words, cwd=str(ROOT))
        async with stdio_client(parameters) as streams, ClientSession(*streams) as client:
            await client.initialize()
            requests = [client.call_tool("view", {"source": "mlp.mlir"}) for _ in range(calls)]
            return await asyncio.gather(*requests)

    return asyncio.run(session())


def test_over_standard_input_and_output(folder: Path) -> None:
    answers = over_standard_streams(folder, 3)
    assert not any(done.is_error for done in answers)
    assert json.loads(answers[0].content[0].text)["rows"][0]["name"] == "stablehlo.dot_general"


def test_limits_of_untrusted_inputs_are_those_of_one_call(folder: Path) -> None:
    failed = over_standard_streams(folder, 2, "--untrusted", "--limit", "cpu_s=0.001")
    assert any(done.is_error for done in failed)  # the one that loads modules; either may be first
    assert len(failed) == 2  # the server answers the second one, too


@pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="programs of this shell ignore interrupts"
)
def test_an_interrupt_ends_the_server(folder: Path) -> None:
    words = [sys.executable, "-m", "hespas", "mcp", str(folder)]
    with subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        server.stdin.flush()
        assert server.stdout.readline()  # the server runs
        server.send_signal(signal.SIGINT)
        assert server.stderr is not None
        assert server.stderr.read() == b"interrupted: no partial output was left\n"
        assert server.wait() == 130


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["mcp", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "is not a folder" in done.stderr
