"""Update the documents: ``python -m tools.generate [--check]``.

``formats.md`` has the registry, the attribute contract, the checker's rules and the table of exit codes. The
commands in ``README.md`` and the other documents run again, two documents at a time, and their output is
updated. A document is skipped if its commands, the package, the fixtures and the environment are those of the
last run, whose digests are in ``.cache/documents.json``.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from importlib.metadata import distributions
from pathlib import Path

from hespas.converters import format_names, load_format
from hespas.converters.chakra.contract import ATTRIBUTES
from hespas.converters.format import Format
from hespas.files.limits import INPUT_BYTES_VARIABLE, Limits
from hespas.graph import Severity
from hespas.graph.errors import EXIT_CODES
from hespas.validators.checker import RULES
from tools.documents import ROOT, document_command
from tools.examples import examples, refreshed, run

__all__ = ["documents", "formats_document", "main"]

_DIGESTS = ROOT / ".cache" / "documents.json"
_DOCUMENTS_AT_ONCE = 2
_INTRODUCTION = """# Formats and rules

Made by `python -m tools.generate` from the registry, the attribute contract and the checker's rules; do not
edit. How to add a row: [CONTRIBUTING](../CONTRIBUTING.md).
"""
_FORMAT_NOTES = """
The content identifies the format of an input, then its suffix; `--from` and `--to` override both. A `.gz`
after any suffix means gzip. A destination without a suffix is a folder of Chakra traces. *Flat* formats
have no loops, branches or zero-cost operations: conversion unrolls loops and removes zero-cost operations.
`hespas-convert --list-formats --json` prints the first table for scripts; other packages add rows through
the entry point group `hespas.formats`.
"""
_ATTRIBUTE_NOTES = """
Sizes are bytes, times ns, operations adds and multiplies. `tensor_size` is bytes read plus written,
`bytes_written` the part written; `comm_size` is the shard of an all-gather and the whole buffer of any
other collective. `duration_nanos` is exact; `duration_micros` of the node carries its remainder along the
stream, from computation to computation and from communication to communication, so that sums of either are
right within 1 us. Omitted are `duration_nanos` if `duration_micros` has the same value, `useful_ops` if it
equals `num_ops`, and `pg_name` if all ranks take part. Every other attribute of an input trace is preserved
with its type and position.

Traces run unchanged under ASTRA-sim's `roofline-enabled` and `track-local-mem`, which its H100
configurations turn on. ASTRA-sim's roofline never finishes a computation of 0 FLOPs or bytes. Hespas
therefore writes 1, and 0 in `counted_ops` or `counted_bytes`. `inputs` and `outputs` list the tensors that
a node reads and writes. Each node writes one tensor, named by the node's id, and reads the tensors of the
nodes that it depends on. Weights and other inputs from outside the trace are not listed, so the tracker's
peak excludes them. A trace of another tool is written with its own attributes; `check` with
`--system-config` reports missing ones (ET024, ET033).

A delay is a computation of `op_class` `free` without a `stream`. It is recorded time in which a queue of
the device waited for the host, for a launch, or for an event that was not recorded. With delays a trace of
a profile takes the measured time. In Hespas a delay runs concurrently with all other work. In ASTRA-sim it
is computation, which is equal if the device runs one operation at a time. Host threads, which are nodes in
Hespas, are written as delays, because ASTRA-sim has no statistics for computation on a CPU.
"""
_FOLDER_NOTES = """
## Folders of rank files

A folder has files `NAME.{rank}.et` and the process groups in `comm_group.json`. Ranks with equal files
share one file through hard links, or copies if the file system has no links or the link limit is reached
(ext4: 65,000): edit a copy. Equal input gives equal bytes for all values of `--jobs`, `--shard`, `--resume`
and `--cluster`.

`--only-classes` writes the file of the lowest rank of each class, identical to the file of the whole set, and
`rank_map.json` (`hespas/schemas/rank_map.schema.json`). Its `representative` has for each rank the rank whose
file is used, -1 without a file. `group_sets` and `permutations` describe groups and messages by digits of the
rank (a rank is `base` plus group digits plus member digits; a shift adds a constant to a digit), or as lists.
`classes` has for each collective and message of a file, in order, the number of its group set or permutation.
Hespas reads such a folder as the whole job and writes all files from it. Other tools need all files.

`--shard I/N` writes one part of the ranks. While others are missing the folder has a marker for each,
`.NAME.ranks-A-B.missing`, and cannot be read; the last shard removes the last marker. `--resume` saves
finished files in `.DST.CHECKSUM.kept.partial` with a checksum of the whole content, and the same command
continues there: files with the right bytes stay. A run to the same destination with `--resume` and other
content removes them.

A folder may have 1,048,576 rank files. It needs as many inodes (`df -i`), and network file systems become
slow much earlier. `rank_map.json` may cover 16,777,216 ranks, and the lists of `comm_group.json` may name
as many. A simulator that reads a file per rank needs memory for each. Hespas opens every file of a whole
set (`python -m benchmarks.rank_files`: about 0.6 ms of CPU each, ten times that for a check) and one file
per class with `--only-classes`. Beyond some thousand ranks keep classes, and write all files only for a
simulator.
"""

_RULE_NOTES = """
`hespas-validate check PATH --profile chakra|astra-sim` applies the severities of that column. Rules that need
a configuration are checked when it is given (`--system-config`, `--network-config`, `--memory-config`).
"""


_LIMIT_NOTES = f"""
Inputs are regular files. A pipe, device or socket is refused (exit code 3), except standard input as `-`.
`--max-input-bytes N`, or `{INPUT_BYTES_VARIABLE}=N` in the environment, trusts inputs of N bytes: it raises
every lower limit in bytes. A gzip stream may then expand to N bytes at any ratio, and a program gets the
memory and time of a program of N bytes. A command that runs out of memory ends with exit code 3 and the
name of the input, also under a limit of the process. Files are read and not mapped into memory; a file that
shrinks during reading is refused.
"""
_LIMITS: dict[str, tuple[str, str]] = {
    "input_bytes": ("every format", "one file, decompressed"),
    "reading_bytes": (
        "every input",
        "memory of reading, and 64 times the input (compressed bytes count tenfold)",
    ),
    "trusted_bytes": ("every input", "treated as if it had at least so many bytes"),
    "packed_free_bytes": ("every gzip stream", "decompressed, whatever the ratio"),
    "packed_ratio": ("every gzip stream", "decompressed to compressed bytes read so far, beyond that"),
    "compressed_packets_bytes": ("`perfetto`", "bytes of compressed packets"),
    "compressed_packets_ratio": ("`perfetto`", "compressed packets to bytes of the file, beyond that"),
    "configuration_bytes": ("system, network and memory configurations", "one file"),
    "device_bytes": ("hardware files, fits and estimator orders (TOML)", "one file; keys at most 64 deep"),
    "report_bytes": ("reports given to `compare`", "one file"),
    "groups_bytes": ("`comm_group.json`", "one file"),
    "table_bytes": ("tables of measured operations (`--table`)", "one file, decompressed"),
    "table_free_bytes": ("Parquet: `--table`, `ops-table`", "columns, unpacked, whatever the ratio"),
    "table_ratio": ("Parquet: `--table`, `ops-table`", "unpacked columns to bytes of the file, beyond that"),
    "table_rows_bytes": ("Parquet: `--table`", "256 for each row, and 20 times the file"),
    "table_columns": ("tables: `--table`, `ops-table`", "columns"),
    "profile_rows_bytes": ("Parquet: `ops-table`", "80 for each row, and 20 times the file"),
    "card_bytes": ("learned models", "card, and stored trees"),
    "model_bytes": ("learned models", "trees, unpacked"),
    "model_trees": ("learned models", "trees of one forest"),
    "model_sizes": ("learned models", "octaves of sizes in the fit"),
    "cell_bytes": ("`nsys`, `rocpd`", "one cell of a database"),
    "text_workload_bytes": ("`astra-text`", "one file, decompressed"),
    "node_fields": ("`chakra`", "fields of one node, or of the metadata"),
    "parser_bytes": ("`stablehlo`, `hlo` (binary)", "memory of the native parser, and 64 times the program"),
    "program_bytes": ("`stablehlo`, `hlo` (binary)", "memory of reading, and 20 times the program"),
    "program_cpu_s": (
        "`stablehlo`, `hlo` (binary)",
        "CPU seconds, one more for every 200 kB; wall time of four times that, plus 20 s",
    ),
    "parser_cpu_s": (
        "`stablehlo`, `hlo` (binary)",
        "CPU seconds of the native parser, extended in the same way",
    ),
    "compared_ranks_bytes": ("`check`, `simulate`", "64 for each rank of a job whose ranks differ"),
    "replayed_operations": ("writing `stablehlo` as a replay", "operations of the program (exit 4)"),
    "replayed_edges": ("writing `stablehlo` as a replay", "dependencies, operands and results (exit 4)"),
    "replayed_characters": ("writing `stablehlo` as a replay", "text of the program (exit 4)"),
}


def _limit_rows() -> Iterable[Sequence[str]]:
    own = Limits()
    for field in fields(own):
        what, counted = _LIMITS[field.name]
        raised = f"`{INPUT_BYTES_VARIABLE}`" if field.name.endswith("_bytes") else "-"
        yield [what, counted, f"{getattr(own, field.name):,}", raised]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _format_row(entry: Format) -> list[str]:
    verbs = [verb for verb, can in (("read", entry.read), ("write", entry.write)) if can]
    suffixes = " ".join(f"`{suffix}`" for suffix in entry.suffixes)
    extra = f"`hespas[{entry.extra}]`" if entry.extra else "-"
    where = entry.specification
    specification = f"<{where}>" if where.startswith("http") else f"`{where}`"
    kind = "yes" if entry.flat else "no"
    return [f"`{entry.name}`", entry.title, suffixes, ", ".join(verbs), kind, extra, specification]


def _severity(severity: Severity | None) -> str:
    return severity.value if severity else "-"


def formats_document() -> str:
    """Return ``formats.md``."""
    formats = _table(
        ("format", "content", "suffixes", "can", "flat", "needs", "specification"),
        (_format_row(load_format(name)) for name in format_names()),
    )
    attributes = _table(
        ("attribute", "type"), ([f"`{name}`", f"`{kind.name.lower()}`"] for name, kind in ATTRIBUTES.items())
    )
    rules = _table(
        ("code", "rule", "looks at", "always", "chakra", "astra-sim", "needs"),
        (
            [
                rule.code,
                rule.title,
                rule.scope.value,
                *(_severity(found) for found in (rule.plain, rule.chakra, rule.astra_sim)),
                ", ".join(rule.needs) or "-",
            ]
            for rule in RULES
        ),
    )
    codes = _table(
        ("code", "error", "meaning"),
        [
            ["0", "-", "Done and valid."],
            *(
                [str(code), f"`{kind.__name__}`", (kind.__doc__ or "").partition("\n")[0]]
                for kind, code in EXIT_CODES.items()
            ),
        ],
    )
    limits = _table(("input or output", "what is counted", "limit", "raised by"), _limit_rows())
    return (
        f"{_INTRODUCTION}\n## Formats\n\n{formats}{_FORMAT_NOTES}"
        f"\n## Attributes of a Chakra node\n\n{attributes}{_ATTRIBUTE_NOTES}"
        f"{_FOLDER_NOTES}"
        f"\n## Rules of the checker\n\n{rules}{_RULE_NOTES}"
        f"\n## Limits\n\n{limits}{_LIMIT_NOTES}\n## Exit codes\n\n{codes}"
    )


def documents() -> Mapping[Path, str]:
    """Return ``formats.md``, and the documents that show commands with their current output."""
    formats = ROOT / "docs" / "formats.md"
    texts = {
        path: formats_document() if path == formats else path.read_text("utf-8")
        for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    }
    sources = _sources_digest()
    known: dict[str, str] = json.loads(_DIGESTS.read_text("utf-8")) if _DIGESTS.is_file() else {}
    stale = [path for path, text in texts.items() if known.get(path.name) != _digest(sources, text)]
    with ThreadPoolExecutor(_DOCUMENTS_AT_ONCE) as pool:
        texts |= zip(stale, pool.map(_current, (texts[path] for path in stale)), strict=True)
    _DIGESTS.parent.mkdir(exist_ok=True)
    digests = {path.name: _digest(sources, text) for path, text in texts.items()}
    _DIGESTS.write_text(json.dumps(digests, indent=2) + "\n", "utf-8")
    return texts


def _current(text: str) -> str:
    """Return a document with the current output of its commands."""
    shown = examples(text)
    with tempfile.TemporaryDirectory() as folder:
        return refreshed(text, shown, run(shown, Path(folder), ROOT))


def _sources_digest() -> bytes:
    """Return a digest of everything that outputs depend on besides the commands."""
    digest = hashlib.blake2b(sys.version.encode())
    for package in sorted(f"{found.name} {found.version}" for found in distributions()):
        digest.update(package.encode())
    for folder in ("hespas", "fixtures"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.digest()


def _digest(sources: bytes, text: str) -> str:
    return hashlib.blake2b(sources + text.encode(), digest_size=16).hexdigest()


def main() -> int:
    """Write and print the changed documents; return 1 if ``--check`` finds a stale one."""
    return document_command(__doc__, documents)


if __name__ == "__main__":
    sys.exit(main())
