"""``hespas mcp``: tools with the options of the commands, and the files that they may use."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.server.mcpserver import MCPServer
from typer.testing import CliRunner

import hespas
from hespas.cli.main import app
from hespas.cli.mcp import ToolSettings, tool_functions
from hespas.graph.hints import options_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    shutil.copy(ROOT / "fixtures" / "stablehlo" / "mlp.mlir", inputs)
    (tmp_path / "outputs").mkdir()
    return inputs


def server_of(folder: Path, *, writes: bool = False) -> MCPServer:
    server = MCPServer("hespas")
    for function in tool_functions(ToolSettings([folder], folder.parent / "outputs" if writes else None)):
        server.add_tool(function)
    return server


def answer(server: MCPServer, tool: str, **arguments: Any) -> dict[str, Any]:
    done: Any = asyncio.run(server.call_tool(tool, arguments))
    content: dict[str, Any] = json.loads(done.content[0].text)
    return content


def refusal(server: MCPServer, tool: str, **arguments: Any) -> str:
    with pytest.raises(Exception, match="Error executing tool") as caught:
        asyncio.run(server.call_tool(tool, arguments))
    return str(caught.value)


def schema(server: MCPServer, tool: str) -> Mapping[str, Any]:
    tools: Any = asyncio.run(server.list_tools())
    found: Mapping[str, Any] = next(each.input_schema for each in tools if each.name == tool)
    return found


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
    properties = schema(server, "simulate")["properties"]
    offered = set(options_of(hespas.simulate)) - {"astra_bin", "astra_timeout", "simulator", "timeline"}
    assert set(properties) == offered | {"rows"}
    assert properties["granularity"]["anyOf"][0]["enum"] == ["op", "fused", "region"]
    assert schema(server, "estimate")["required"] == ["hardware"]
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
    assert "convert" not in {each.__name__ for each in tool_functions(ToolSettings([folder], None))}
    assert "destination" not in schema(server_of(folder), "generate_llm")["properties"]
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
        assert "input files need permission for this" in text
    assert answer(server, "estimate", source="mlp.mlir", hardware="H100-SXM", estimator="roofline")


def test_over_standard_input_and_output(folder: Path) -> None:
    async def session() -> Any:
        words = ["-m", "hespas", "mcp", str(folder)]
        parameters = StdioServerParameters(command=sys.executable, args=words, cwd=str(ROOT))
        async with stdio_client(parameters) as streams, ClientSession(*streams) as client:
            await client.initialize()
            return await client.call_tool("view", {"source": "mlp.mlir"})

    done = asyncio.run(session())
    assert not done.is_error
    assert json.loads(done.content[0].text)["rows"][0]["name"] == "stablehlo.dot_general"


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["mcp", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "is not a folder" in done.stderr
