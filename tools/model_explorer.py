"""Write the node ids of Model Explorer for some fixtures: ``python -m tools.model_explorer``.

The program needs ``ai-edge-model-explorer-adapter`` (0.2.1), which no extra of Hespas installs. It writes
``tests/api/model_explorer_ids.json``. In this file, the label at index ``i`` of a graph is the label of node
``i``. Nodes of arguments, whose ids are not numbers, are excluded.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from importlib import import_module, metadata
from itertools import count, takewhile
from pathlib import Path
from typing import Any

__all__ = ["IDS", "main"]

ROOT = Path(__file__).parents[1]
IDS = ROOT / "tests" / "api" / "model_explorer_ids.json"
ADAPTER = "ai-edge-model-explorer-adapter"
PROGRAMS = (
    "branches.mlir",
    "collectives_shard_map.mlir",
    "hand_async.mlir",
    "hand_loops.mlir",
    "hand_reductions.mlir",
    "hand_structure.mlir",
    "llama_train_1dev.mlir.gz",
    "mlp.mlir",
    "moe_all_to_all.mlir",
    "pipeline_ring.mlir",
    "random_mask.mlir",
    "scan_nested.mlir",
)


def _labels(path: Path) -> dict[str, list[str]]:
    """Return the labels of the numbered nodes of each graph of a program."""
    adapter: Any = import_module("ai_edge_model_explorer_adapter")
    text = path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "program.mlir"
        plain.write_bytes(gzip.decompress(text) if path.suffix == ".gz" else text)
        collection = json.loads(adapter.ConvertMlirToJson(adapter.VisualizeConfig(), str(plain)))
    graphs: dict[str, list[str]] = {}
    for graph in (graph for part in collection for graph in part["subgraphs"]):
        labels = {node["id"]: node["label"] for node in graph["nodes"]}
        graphs[graph["id"]] = [labels[number] for number in takewhile(labels.__contains__, map(str, count()))]
    return graphs


def main() -> None:
    """Convert the programs and write the file."""
    document = {
        "made_by": "python -m tools.model_explorer",
        "adapter": f"{ADAPTER} {metadata.version(ADAPTER)}",
        "programs": {name: _labels(ROOT / "fixtures" / "stablehlo" / name) for name in PROGRAMS},
    }
    IDS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
