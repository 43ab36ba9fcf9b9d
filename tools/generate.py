"""Command that updates the documents: ``python -m tools.generate [--check]``.

Four pages of ``docs/reference`` are generated from the code: formats with the attributes of Chakra nodes,
rules of the checker, columns of tables of runs, and limits with exit codes. The commands in ``README.md`` and
the pages of ``docs`` run again, two documents at a time, and their output is updated. A document is skipped
if its commands, the package with its samples and the environment are those of the last run, whose digests are
in ``.cache/documents.json``.
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
from hespas.generators.llm.published import SETTINGS
from hespas.graph import Severity
from hespas.graph.errors import EXIT_CODES
from hespas.validators.checker import RULES
from tools.documents import ROOT, document_command
from tools.examples import examples, refreshed, run

__all__ = [
    "DOCUMENTS_AT_ONCE",
    "REFERENCE",
    "documents",
    "documents_with_commands",
    "main",
    "reference_pages",
]

_DIGESTS = ROOT / ".cache" / "documents.json"
DOCUMENTS_AT_ONCE = 2
REFERENCE = ROOT / "docs" / "reference"
_INTRODUCTION = """# Formats

Formats that Hespas reads and writes, and the attributes of its Chakra traces. Made by
`python -m tools.generate` from the code; do not edit. [Contributing](../contributing.md#a-format) explains
how to add a format.
"""
_RULES_INTRODUCTION = """# Rules of the checker

Rules of `hespas-validate check` ([how to use it](../how-to/check.md)). Made by `python -m tools.generate`
from the code; do not edit.
"""
_RUNS_INTRODUCTION = """# Columns of tables of training runs

Tables of `hespas-validate league` and of `hespas generate llm --row`
([how to use them](../how-to/published-runs.md)). Made by `python -m tools.generate` from the code; do
not edit.

Required are `model`, `accelerator`, `num_accelerators`, `seq_len`, `global_batch` and, to compare,
`step_time_ms`. Optional are `source` (the software stack), `framework`, `release`, `micro_batch`,
`grad_accum`, `dp`, `tp`, `pp`, `vp`, `cp`, `ep`, `etp`, `fsdp`, `sequence_parallel`, `recompute`,
`precision`, `precision_class`, `optimizer`, `train_type`, `gpus_per_node`, `accelerator_variant`, `network`,
`step_time_lo_ms`, `step_time_hi_ms`, `mfu_pct`, `peak_memory_gib` and `rows_with_same_config`. Settings of
software and device have columns of their own:
"""
_LIMITS_INTRODUCTION = """# Limits and exit codes

Made by `python -m tools.generate` from the code; do not edit.
"""
_FORMAT_NOTES = """
The format of an input is recognised by its content, then by its suffix; `--from` and `--to` override both.
A `.gz` after any suffix means gzip. A destination without a suffix is a
[folder of Chakra traces](../how-to/many-ranks.md#content-of-the-folder), or one trace if there is one rank.

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
_EXIT_NOTES = """
A failed command states file, position and remedy. Exit code 70 is a bug in Hespas: please report it with the
output of `--debug`.
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


def reference_pages() -> dict[Path, str]:
    """Return the pages that are generated from the code."""
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
    runs = _table(("column", "values"), ([f"`{name}`", values] for name, values in SETTINGS.items()))
    limits = _table(("input or output", "what is counted", "limit", "raised by"), _limit_rows())
    return {
        REFERENCE / "formats.md": f"{_INTRODUCTION}\n{formats}{_FORMAT_NOTES}"
        f"\n## Attributes of a Chakra node\n\n{attributes}{_ATTRIBUTE_NOTES}",
        REFERENCE / "rules.md": f"{_RULES_INTRODUCTION}\n{rules}{_RULE_NOTES}",
        REFERENCE / "runs.md": f"{_RUNS_INTRODUCTION}\n{runs}",
        REFERENCE / "limits.md": f"{_LIMITS_INTRODUCTION}\n## Limits\n\n{limits}{_LIMIT_NOTES}"
        f"\n## Exit codes\n\n{codes}{_EXIT_NOTES}",
    }


def documents() -> Mapping[Path, str]:
    """Return the pages of the reference, and the documents that show commands with their current output."""
    texts = {path: path.read_text("utf-8") for path in documents_with_commands()} | reference_pages()
    sources = _sources_digest()
    known: dict[str, str] = json.loads(_DIGESTS.read_text("utf-8")) if _DIGESTS.is_file() else {}
    stale = [path for path, text in texts.items() if known.get(_name(path)) != _digest(sources, text)]
    with ThreadPoolExecutor(DOCUMENTS_AT_ONCE) as pool:
        texts |= zip(stale, pool.map(_current, (texts[path] for path in stale)), strict=True)
    _DIGESTS.parent.mkdir(exist_ok=True)
    digests = {_name(path): _digest(sources, text) for path, text in texts.items()}
    _DIGESTS.write_text(json.dumps(digests, indent=2) + "\n", "utf-8")
    return texts


def documents_with_commands() -> list[Path]:
    """Return ``README.md`` and all pages of ``docs``."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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
    """Write and print the changed documents; return 1 if one is stale with ``--check``."""
    return document_command(__doc__, documents)


if __name__ == "__main__":
    sys.exit(main())
