"""Open trace set: ``python -m tools.open_set FOLDER [--only NAME...]``.

Thirty workloads, made from settings and from captured programs of ``fixtures``: dense models, mixtures of
experts, recommendation, diffusion, vision, serving phases and collectives, on 1 to 65,536 ranks. Jobs of more
than 8 ranks have one trace per rank class and ``rank_map.json``. Each workload also has a variant
``hidden`` (obfuscated at level ``layers``) and ``card.json``: settings, sizes, totals, verdict of the checker
and the simulated step on two systems. ``cards.json`` has all cards. About 80 CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hespas
from hespas.api import WriteSharding
from hespas.graph import Severity, Workload
from hespas.graph.errors import HespasError
from hespas.graph.passes import totals
from tools.documents import ROOT

__all__ = ["SET", "Entry", "card", "main"]

_DEVICE = "H100-SXM"
_SYSTEMS = {"dgx-h100": "H100-SXM", "hgx-mi300x": "MI300X"}
_MOST_RANK_FILES = 8
_PROGRAMS = ROOT / "fixtures" / "stablehlo"


@dataclass(frozen=True, slots=True)
class Entry:
    """Workload of the set: its kind, and the generator with its settings, or a captured program."""

    name: str
    kind: str
    generator: Callable[..., Any] | None = None
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    program: str = ""

    def workload(self) -> Workload:
        """Return the workload with the times of an H100."""
        if self.generator is None:
            source: Any = hespas.read(_PROGRAMS / self.program)
        else:
            source = self.generator(*([self.model] if self.model else []), **self.settings).workload()
        assert isinstance(source, Workload)
        return source


def _llm(name: str, kind: str, model: str, **settings: Any) -> Entry:
    return Entry(name, kind, hespas.llm_step, model, settings)


SET: tuple[Entry, ...] = (
    _llm("dense-1b-8", "dense", "Llama-3.2-1B", dp=8, seq=2048, global_batch=16),
    _llm("dense-3b-16-tp", "dense", "Qwen2.5-3B", dp=8, tp=2, seq=4096, global_batch=16),
    _llm("dense-7b-16-pp", "dense", "Llama-2-7B", dp=4, tp=2, pp=2, seq=4096, global_batch=32),
    _llm("dense-8b-64-fsdp", "dense", "Llama-3-8B", dp=64, fsdp=True, seq=8192, global_batch=64),
    _llm("dense-9b-32-cp", "dense", "Gemma-2-9B", dp=4, tp=2, cp=4, seq=32768, global_batch=4),
    _llm("dense-13b-64-gpipe", "dense", "Llama-2-13B", dp=8, tp=2, pp=4, global_batch=64, schedule="gpipe"),
    _llm("dense-14b-128", "dense", "Qwen3-14B", dp=32, tp=4, seq=4096, global_batch=64),
    _llm("dense-70b-256", "dense", "Llama-3-70B", dp=8, tp=8, pp=4, seq=4096, global_batch=64),
    _llm("dense-70b-1024-vp", "dense", "Llama-2-70B", dp=16, tp=8, pp=8, vp=2, schedule="interleaved",
         global_batch=256),
    _llm("dense-175b-4096", "dense", "GPT-3-175B", dp=64, tp=8, pp=8, seq=2048, global_batch=512),
    _llm("dense-405b-16384", "dense", "Llama-3.1-405B", dp=128, tp=8, pp=16, global_batch=2048),
    _llm("dense-405b-65536", "dense", "Llama-3.1-405B", dp=512, tp=8, pp=16, global_batch=4096),
    _llm("moe-16b-16", "mixture of experts", "DeepSeek-V2-Lite", dp=16, ep=16, seq=4096, global_batch=16),
    _llm("moe-30b-32", "mixture of experts", "Qwen3-30B-A3B", dp=32, ep=8, seq=4096, global_batch=32),
    _llm("moe-47b-64", "mixture of experts", "Mixtral-8x7B", dp=16, tp=4, ep=8, global_batch=64),
    _llm("moe-671b-2048", "mixture of experts", "DeepSeek-V3", dp=128, pp=16, ep=64, global_batch=2048),
    _llm("hybrid-8", "state space", "Mamba2-780M", dp=8, seq=4096, global_batch=16),
    _llm("prefill-8b-8", "serving", "Llama-3-8B", phase="prefill", tp=8, batch=8, prompt=4096),
    _llm("decode-8b-8", "serving", "Llama-3-8B", phase="decode", tp=8, batch=64, context=4096),
    _llm("decode-671b-32", "serving", "DeepSeek-V3", phase="decode", dp=32, ep=32, batch=64, context=4096),
    _llm("mixed-70b-8", "serving", "Llama-3-70B", phase="mixed", tp=8, batch=32, context=2048, prompt=512),
    Entry("dlrm-8", "recommendation", hespas.dlrm_step, "", {"ranks": 8}),
    Entry("dlrm-128-row", "recommendation", hespas.dlrm_step, "",
          {"ranks": 128, "sharding": "row", "rows": 1 << 20}),
    Entry("dit-8", "diffusion", hespas.dit_step, "", {"dp": 8, "batch": 32}),
    Entry("dit-64-fsdp", "diffusion", hespas.dit_step, "", {"dp": 64, "batch": 16, "fsdp": True}),
    Entry("vit-32", "vision", hespas.vit_step, "", {"dp": 32, "batch": 64}),
    Entry("collectives-16", "collectives", hespas.collective_benchmark, "", {"ranks": 16}),
    Entry("captured-llama-8", "captured", program="llama_fsdp_tp_local_N8.mlir.gz"),
    Entry("captured-cnn-1", "captured", program="cnn_train.mlir"),
    Entry("captured-moe-8", "captured", program="moe_all_to_all.mlir"),
)  # fmt: skip
"""The workloads of the set."""


def card(entry: Entry, workload: Workload) -> dict[str, Any]:
    """Return the card of a workload: settings, sizes, totals of all ranks, verdict, simulated steps."""
    sums = [totals(graph) for graph in workload.classes]

    def total(name: str) -> float:
        values: list[float] = [getattr(one, name) for one in sums]
        return sum(ranks * value for ranks, value in zip(workload.class_sizes, values, strict=True))

    found = hespas.check(workload, profile="chakra")
    steps: dict[str, float | None] = {}
    for system, device in _SYSTEMS.items():
        try:
            steps[system] = hespas.simulate(workload, device, system=system).step_ns
        except HespasError:
            steps[system] = None
    return {
        "name": entry.name,
        "kind": entry.kind,
        "model": entry.model,
        "settings": dict(entry.settings),
        "ranks": workload.num_ranks,
        "rank_classes": len(workload.classes),
        "nodes_of_all_classes": sum(map(len, workload.classes)),
        "flops": total("flops"),
        "bytes_moved": total("bytes_moved"),
        "collectives": total("collectives"),
        "collective_bytes": total("collective_bytes"),
        "messages": total("messages"),
        "errors_of_the_checker": sum(
            found.counts[violation.code]
            for violation in {v.code: v for v in found.violations}.values()
            if violation.severity is Severity.ERROR
        ),
        "step_ns": steps,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the set, and print a line per workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of workloads (default: all)")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.only or ()) - {entry.name for entry in SET}
    if unknown:
        sys.exit(f"no workload {sorted(unknown)[0]!r} in the set")
    cards: list[dict[str, Any]] = []
    for entry in SET:
        if chosen.only and entry.name not in chosen.only:
            continue
        workload = entry.workload()
        folder = chosen.folder / entry.name
        folder.mkdir(parents=True, exist_ok=True)
        parts = WriteSharding(only_classes=workload.num_ranks > _MOST_RANK_FILES)
        for name, hidden in (("traces", None), ("hidden", chosen.folder / "set.key")):
            hespas.convert(
                workload,
                folder / name,
                target_format="chakra",
                hardware=_DEVICE,
                obfuscate=hidden,
                obfuscate_level="layers" if hidden else "names",
                parts=parts,
                overwrite=True,
            )
        cards.append(card(entry, workload))
        text = json.dumps(cards[-1], indent=2)
        (folder / "card.json").write_text(text + "\n", encoding="utf-8")
        sys.stdout.write(f"{entry.name}: {workload!r}, {cards[-1]['errors_of_the_checker']} errors\n")
        sys.stdout.flush()
    (chosen.folder / "cards.json").write_text(json.dumps(cards, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
