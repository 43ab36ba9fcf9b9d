"""Update the documents: ``python -m tools.generate [--check]``.

``formats.md`` has the registry, the attribute contract, the checker's rules and the table of exit codes. The
commands in ``README.md`` and the other documents run again, two documents at a time, and their output is
updated. A document is skipped if its commands, the package with its samples and the environment are those of
the last run, whose digests are in ``.cache/documents.json``.
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

This page lists the formats that Hespas reads and writes, the attributes of its Chakra traces, the rules of
`hespas-validate check`, the limits of inputs, and the exit codes. Made by `python -m tools.generate` from
the code; do not edit. How to add a row: [CONTRIBUTING](../CONTRIBUTING.md#extending).
"""
_FORMAT_NOTES = """
The format of an input is recognised by its content, then by its suffix; `--from` and `--to` override both.
A `.gz` after any suffix means gzip. A destination without a suffix is a folder of Chakra traces.

*Flat* formats have no loops, branches or zero-cost operations (views, constants, tuples). Conversion to
them unrolls loops, takes one arm of each branch and removes zero-cost operations. For scripts,
`hespas-convert --list-formats --json` prints the table. Other packages can add formats through the entry
point group `hespas.formats`.
"""
_ATTRIBUTE_NOTES = """
These attributes are on the nodes of traces that Hespas writes. Sizes are in bytes, times in ns, and
operations are additions and multiplications. `tensor_size` is bytes read plus written, `bytes_written` the
part written. `comm_size` is the size of the shard for an all-gather, and of the whole buffer for any other
collective.

`duration_nanos` is exact. The node's own field `duration_micros` has whole microseconds. Its rounding
remainder is added to the next computation (or communication) of the stream, so that sums of either are
right within 1 us.

Some attributes are omitted: `duration_nanos` if `duration_micros` has the same value, `useful_ops` if it
equals `num_ops`, and `pg_name` if all ranks take part. If the input is a trace, its other attributes are
preserved with type and position.

The H100 configurations of ASTRA-sim turn on `roofline-enabled` and `track-local-mem`; traces run with them
unchanged. ASTRA-sim's roofline never finishes a computation of 0 FLOPs or bytes. Hespas therefore writes 1,
and records the true 0 in `counted_ops` or `counted_bytes`.

Memory tracking needs `inputs` and `outputs`, the tensors that a node reads and writes. Each node writes one
tensor, named by the node's id, and reads the tensors of the nodes that it depends on. Weights and other
inputs from outside the trace are not listed, so the peak that ASTRA-sim reports excludes them. A trace of
another tool is written with its own attributes only; `check` with `--system-config` reports the missing
ones (ET024, ET033).

A trace of a profile has *delays*, so that it takes the measured time. A delay is recorded time in which a
queue of the device waited for the host, for a launch, or for an event that was not recorded. It is written
as a computation of `op_class` `free` without a `stream`. In Hespas a delay runs concurrently with all other
work. ASTRA-sim treats it as computation, which gives the same time if the device runs one operation at a
time. Host threads are nodes in Hespas; in the trace they are delays, because ASTRA-sim has no statistics
for computation on a CPU.
"""
_FOLDER_NOTES = """
## Folders of rank files

A job is written as a folder with a Chakra trace per rank, `NAME.{rank}.et`, and the process groups in
`comm_group.json`. Ranks with equal files share one file through hard links; edit only a copy, because a
change would affect all of them. If the file system has no links or the link limit is reached (ext4:
65,000), the files are copies. The same input gives the same bytes for all values of `--jobs`, `--shard`,
`--resume` and `--cluster`.

`--only-classes` writes one file per rank class (ranks that run the same program), so that large jobs need
few files. The file is the trace of the lowest rank of the class. `rank_map.json`
(`hespas/schemas/rank_map.schema.json`) has what the other ranks need:

- `representative` has for each rank the rank whose file is used, or -1 if there is none.
- `group_sets` and `permutations` describe process groups and messages, as lists or by digits of the rank.
  In the second form a rank is `base` plus group digits plus member digits, and a shift adds a constant to a
  digit.
- `classes` has for each collective and message of a file, in order, the number of its group set or
  permutation.

Hespas reads such a folder as the whole job and can write all files from it. Other tools need all files.

`--shard I/N` writes one part of the ranks, so that several machines can write one folder. While parts are
missing the folder cannot be read and has a marker for each, `.NAME.ranks-A-B.missing`; the last shard
removes the last marker.

`--resume` makes an interrupted conversion continue. It saves finished files in `.DST.CHECKSUM.kept.partial`
with a checksum of the whole content. The same command continues there and writes only the files that are
missing or have wrong bytes. A command with `--resume`, the same destination and other content removes them.

Large jobs reach limits of file systems and simulators. A folder may have 1,048,576 rank files. It needs as
many inodes (`df -i`), and network file systems become slow much earlier. `rank_map.json` may have
16,777,216 ranks, and so may the lists of `comm_group.json`. A simulator that reads a file per rank needs
memory for each. Hespas opens every file of a whole set (about 0.6 ms of CPU each, ten times that for a
check: `python -m benchmarks.rank_files`), but one file per class with `--only-classes`. Beyond some
thousand ranks use `--only-classes`, and write all files only for a simulator that needs them.
"""

_RULE_NOTES = """
The columns *always*, *chakra* and *astra-sim* are the severities of a rule without `--profile`, with
`--profile chakra` and with `--profile astra-sim`. Rules that need a configuration are checked only if it is
given (`--system-config`, `--network-config`, `--memory-config`).
"""


_LIMIT_NOTES = f"""
These limits protect against files that would exhaust memory or time; larger inputs are refused.
`--max-input-bytes N`, or `{INPUT_BYTES_VARIABLE}=N` in the environment, permits inputs of N bytes: it
raises every lower limit in bytes. A gzip stream may then expand to N bytes at any ratio, and a program gets
the memory and time of a program of N bytes. A command that runs out of memory ends with exit code 3 and the
name of the input, also under a limit of the process.

Inputs are regular files. A pipe, device or socket is refused (exit code 3), except standard input as `-`.
Files are read and not mapped into memory; a file that shrinks during reading is refused.
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
        return refreshed(text, shown, run(shown, Path(folder)))


def _sources_digest() -> bytes:
    """Return a digest of everything that outputs depend on besides the commands."""
    digest = hashlib.blake2b(sys.version.encode())
    for package in sorted(f"{found.name} {found.version}" for found in distributions()):
        digest.update(package.encode())
    for folder in ("hespas",):
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
