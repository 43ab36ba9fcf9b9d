"""Settings of published runs as columns of their table: ``python -m tools.published_settings IN OUT``.

The published tables describe settings of software and device in free text (``notes``,
``accelerator_variant``). Readers of tables use columns only, so the columns are derived here, once.

Recipes of Megatron-Bridge from release 26.08 on are programs. The notes state only some of their settings. A
row of such a release has the other settings of the newest earlier row of the same model on the same
accelerators.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copyfile

from hespas.generators.llm.published import MODELS, SETTINGS, rows_of

__all__ = ["main", "prepared_table", "table_with_settings", "with_settings"]

_PHRASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "communication_overlap": ("off", ("communication overlap off",)),
    "tensor_overlap": ("yes", ("tp overlap", "async tp", "overlap for dp, tp")),
    "expert_overlap": ("microbatches", ("moe a2a overlap true",)),
    "context_communication": ("all-to-all", ("cp communication: all-to-all",)),
    "compiled": ("no", ("no torch.compile",)),
    "attention_flops": ("full", ("without the causal half",)),
}
"""Columns that have a value if the notes contain one of the phrases."""


def with_settings(row: Mapping[str, str]) -> dict[str, str]:
    """Return the row with every column of :data:`SETTINGS`; missing columns are derived from its text."""
    missing = [name for name in SETTINGS if name not in row]
    if not missing:
        return dict(row)
    notes, variant = row.get("notes", "").casefold(), row.get("accelerator_variant", "")
    cells = {
        name: value if any(phrase in notes for phrase in phrases) else ""
        for name, (value, phrases) in _PHRASES.items()
    }
    if not cells["compiled"] and "torch.compile" in notes:
        cells["compiled"] = "yes"
    cells["cuda_graphs"] = "none" if "cuda graphs none" in notes else ""
    if re.search(r"cuda graphs(?! none)", notes):
        is_partial = "transformer_engine" in notes and "full_iteration" not in notes
        cells["cuda_graphs"] = "parts" if is_partial else "all"
    dispatcher = re.search(r"dispatcher (deepep|hybridep)|(all-to-all) dispatcher", notes)
    cells["expert_dispatch"] = (dispatcher[1] or dispatcher[2]) if dispatcher else ""
    capacity = re.search(r"capacity[ _]factor (\d+(?:\.\d+)?)", notes)
    is_dropped = "over capacity dropped" in notes
    cells["capacity_factor"] = capacity[1] if capacity else "dropped" if is_dropped else ""
    # Megatron-LM trained in fp16 accumulates and reduces gradients in 16 bits unless an option is given
    # (--accumulate-allreduce-grads-in-fp32). The fused accumulation of 2022 needs that option.
    is_early = re.search(r"Megatron-LM \(202[0-2]", row.get("framework", "")) is not None
    reduces_16bit = is_early and "fp16" in row.get("precision", "")
    cells["gradient_precision"] = "16bit" if reduces_16bit else ""
    cells["gradient_fusion"] = "no" if reduces_16bit else ""
    # torchtitan prints the most memory that PyTorch's allocator has reserved
    cells["peak_memory_kind"] = "reserved" if row.get("source") == "torchtitan" else ""
    power = re.search(r"(\d+) W power limit", variant)
    cells["power_limit_w"] = power[1] if power else ""
    memory = re.search(r"(\d+) GB HBM", variant)
    cells["memory_gib"] = memory[1] if memory else ""
    bandwidth = re.search(r"(\d+(?:\.\d+)?) TB/s", variant)
    cells["memory_bandwidth_gb_per_s"] = f"{float(bandwidth[1]) * 1e3:g}" if bandwidth else ""
    return {**row, **{name: cells[name] for name in missing}}


_PROGRAM = "bridge/perf_recipes"
"""Part of the notes of rows whose recipe is a program."""
_INHERITED = ("cuda_graphs", "expert_overlap", "expert_dispatch")
_SAME = ("source", "model", "accelerator", "num_accelerators", "precision")


def _release(row: Mapping[str, str]) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", row.get("release", "")))


def _with_inherited(row: dict[str, str], rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return a row with the settings that its recipe keeps from an earlier release."""
    if _PROGRAM not in row.get("notes", ""):
        return row
    earlier = [
        other
        for other in sorted(rows, key=_release, reverse=True)
        if _release(other) < _release(row) and all(other.get(name) == row.get(name) for name in _SAME)
    ]
    for name in _INHERITED:
        stated = next((other[name] for other in earlier if other.get(name)), "")
        row = {**row, name: row[name] or stated}
    return row


def table_with_settings(table: Path) -> str:
    """Return the table as CSV text, with its missing columns added."""
    given = list(rows_of(table))
    rows = [with_settings(row) for row in given]
    if given and not all(name in given[0] for name in _INHERITED):
        rows = [_with_inherited(row, rows) for row in rows]
    text = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def prepared_table(table: Path, folder: Path) -> Path:
    """Write the table with all columns into a folder, with the models that its rows name."""
    prepared = folder / table.name
    prepared.write_text(table_with_settings(table), "utf-8")
    if (models := table.with_name(MODELS)).is_file():
        copyfile(models, folder / MODELS)
    return prepared


def main() -> None:
    """Write the table with the added columns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path, help="table of published runs, CSV")
    parser.add_argument("out", type=Path, help="table to write")
    options = parser.parse_args()
    options.out.write_text(table_with_settings(options.table), "utf-8")


if __name__ == "__main__":
    main()
