"""Samples: small input files of every kind that the documents use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from hespas.api.arguments import checked
from hespas.api.documents import Document, Result
from hespas.files.documents import Count, document_bytes
from hespas.files.output import check_destination, write_atomically
from hespas.graph.errors import UsageError
from hespas.graph.hints import Option
from hespas.report import Column, Table, table_from_rows
from hespas.report.texts import counted

__all__ = ["FILES", "Sample", "Samples", "SamplesDocument", "catalogue", "sample"]

_FOLDER = Path(__file__).parents[1] / "samples"
FILES = _FOLDER / "files"
"""Folder of the files in the package."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Group of files, with their paths in a folder of samples, and a ``command`` that uses one of them."""

    name: str
    description: str
    files: tuple[str, ...]
    command: str

    def command_in(self, folder: str) -> str:
        """Return the command for files in a folder."""
        return self.command.replace("samples/", f"{folder}/") if folder else self.command

    @property
    def size_bytes(self) -> int:
        """Return the size of the files."""
        return sum((FILES / file).stat().st_size for file in self.files)


class _Catalogue(msgspec.Struct, forbid_unknown_fields=True):
    samples: tuple[Sample, ...]


@cache
def catalogue() -> tuple[Sample, ...]:
    """Return all samples of the package."""
    return msgspec.toml.decode((_FOLDER / "catalogue.toml").read_bytes(), type=_Catalogue).samples


class _SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """Row of ``samples`` in the document."""

    name: str
    description: str
    files: list[str]
    size_bytes: Count
    command: str


class SamplesDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas sample --json``. ``written`` is the folder that holds the files, empty if
    they were listed only.
    """

    schema: Literal["hespas.samples/1"] = "hespas.samples/1"
    written: str
    samples: list[_SampleRow]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Samples(Result):
    """Samples that were listed, or written to the folder ``written``."""

    samples: tuple[Sample, ...]
    written: str = ""

    def headline(self) -> str:
        """Return the summary line: the numbers of samples and files, and the folder."""
        files = counted(sum(len(entry.files) for entry in self.samples), "file")
        written = f" -> {self.written}" if self.written else ""
        return f"{counted(len(self.samples), 'sample')}, {files}{written}"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.samples/1``."""
        rows = [
            _SampleRow(
                name=entry.name,
                description=entry.description,
                files=list(entry.files),
                size_bytes=entry.size_bytes,
                command=entry.command_in(self.written),
            )
            for entry in self.samples
        ]
        return document_bytes(SamplesDocument(inputs=[], diagnostics=[], written=self.written, samples=rows))

    def table(self) -> Table:
        """Return the result as a table with one row per sample."""
        header = (
            Column("name"),
            Column("files", kind="count"),
            Column("size_bytes", "size", "bytes"),
            Column("description"),
            Column("command"),
        )
        rows = [
            (
                entry.name,
                len(entry.files),
                entry.size_bytes,
                entry.description,
                entry.command_in(self.written),
            )
            for entry in self.samples
        ]
        return table_from_rows(header, rows)


_Names = Annotated[
    Sequence[str],
    Option("Names of samples, or all.", metavar="[NAME]...", is_argument=True, is_required=False),
]
_Folder = Annotated[
    Path, Option("Write the files to this folder.", flag="out", metavar="DIR", access="writes")
]


@checked()
def sample(names: _Names = (), *, folder: _Folder = Path("samples"), overwrite: bool = False) -> Samples:
    """Write samples by ``names`` (``all``: every one) to ``folder``. Without names, list the samples.

    Other files in the folder stay. Raises ``UsageError`` for an unknown name, ``OutputError`` for a file that
    exists, without ``overwrite``, and for one that cannot be written.

    Examples:
        >>> hespas.sample()
        <Samples: 11 samples, 47 files>
    """
    by_name = {entry.name: entry for entry in catalogue()}
    for name in names:
        if name not in by_name and name != "all":
            near = get_close_matches(name, by_name, 1)
            hint = f"did you mean {near[0]}?" if near else f"choose some of {', '.join(by_name)}, or all"
            raise UsageError(f"unknown sample {name!r}", hint=hint)
    if not names:
        return Samples(samples=catalogue())
    chosen = catalogue() if "all" in names else tuple(by_name[name] for name in dict.fromkeys(names))

    files = [file for entry in chosen for file in entry.files]
    for file in files:
        if (folder / file).parent.is_dir():
            check_destination(folder / file, overwrite=overwrite)
    for file in files:
        target, content = folder / file, (FILES / file).read_bytes()
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, partial(_write, content), overwrite=overwrite, directory=False)
    return Samples(samples=chosen, written=str(folder))


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)
