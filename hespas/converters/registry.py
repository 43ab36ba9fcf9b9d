"""Table of formats, and recognition of an input's format: content first, suffix second.

Rows are strings, so listing formats imports no format and no heavy library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from hespas.converters.format import HEAD_BYTES, Format, Head, ReadOptions
from hespas.files.streams import input_location, read_start, refuse_special_files
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from hespas.graph.plugins import PluginTable

__all__ = [
    "BUILTIN",
    "ENTRY_POINT_GROUP",
    "find_format",
    "format_for_output",
    "format_names",
    "is_flat",
    "is_recognised",
    "load_format",
    "note_unread_files",
    "refuse_unused_options",
    "sniff",
    "usable_formats",
]

BUILTIN: dict[str, str] = {
    "stablehlo": "hespas.converters.stablehlo:FORMAT",
    "hlo": "hespas.converters.hlo:FORMAT",
    "op-graph": "hespas.converters.op_graph:FORMAT",
    "op-graph-arrow": "hespas.converters.op_graph:FORMAT_ARROW",
    "chakra": "hespas.converters.chakra:FORMAT",
    "dot": "hespas.converters.drawing:FORMAT_DOT",
    "graphml": "hespas.converters.drawing:FORMAT_GRAPHML",
    "kineto": "hespas.converters.pytorch:FORMAT_KINETO",
    "chakra-json": "hespas.converters.chakra:FORMAT_JSON",
    "astra-text": "hespas.converters.astra_text:FORMAT",
    "pytorch-et": "hespas.converters.pytorch:FORMAT_ET",
    "pytorch": "hespas.converters.pytorch:FORMAT",
    "xplane": "hespas.converters.xplane:FORMAT",
    "jax-trace": "hespas.converters.xplane:FORMAT_JSON",
    "ops-table": "hespas.converters.ops_table:FORMAT",
    "chrome-trace": "hespas.converters.chrome_trace:FORMAT",
    "perfetto": "hespas.converters.perfetto:FORMAT",
    "nsys": "hespas.converters.nsys:FORMAT",
    "rocpd": "hespas.converters.rocpd:FORMAT",
    "rocprofv3": "hespas.converters.rocpd:FORMAT_JSON",
}
"""Name -> ``module:attribute`` of each format that ships with the package."""

ENTRY_POINT_GROUP = "hespas.formats"
_CERTAIN_ENOUGH = 50
_CERTAIN = 90
"""Confidence that ends the comparison with other formats, whose code then need not be loaded."""


_TABLE = PluginTable("format", ENTRY_POINT_GROUP, BUILTIN)


def format_names() -> tuple[str, ...]:
    """Return the names of all formats, built-in first, in a fixed order."""
    return _TABLE.names()


def load_format(name: str) -> Format:
    """Import the format ``name`` and return it.

    Raises ``UsageError`` for an unknown name, ``UnsupportedError`` for a plug-in that fails to import or is
    invalid, and ``InvariantError`` for such a built-in format.
    """
    loaded = _TABLE.load(name)
    if not isinstance(loaded, Format):
        raise _TABLE.unusable(name, f"the entry point is a {type(loaded).__name__}, not a Format")
    if loaded.name != name:
        raise _TABLE.unusable(name, f"the registered format has another name, {loaded.name!r}")
    _TABLE.guarded(name, lambda: "".join(loaded.suffixes))  # suffixes must be texts
    return loaded


def usable_formats() -> Iterator[Format]:
    """Yield all formats, except plug-ins that fail to import or are invalid.

    Plug-ins come last, because finding them takes longer than a small conversion.
    """
    yield from map(load_format, BUILTIN)
    for name in sorted(_TABLE.plugins()):
        with suppress(UnsupportedError):
            yield load_format(name)


def _score(entry: Format, head: Head) -> int:
    """Return the confidence of a format for an input; 0 for a plug-in that fails."""
    sniff_it = entry.sniff
    if sniff_it is None or entry.read is None or (entry.never_json and head.is_json):
        return 0
    try:
        return int(_TABLE.guarded(entry.name, lambda: sniff_it(head)))
    except UnsupportedError:
        if entry.name in BUILTIN:
            raise
        return 0


def _read_head(path: Path) -> Head:
    if path.is_dir():
        try:
            names = sorted(entry.name for entry in path.iterdir())[:1000]
        except OSError as error:
            raise FormatError(error.strerror or str(error), path=str(path), hint="check the path") from error
        return Head(path, b"", (), is_directory=True, names=tuple(names))
    suffixes = tuple(suffix for suffix in path.suffixes if suffix != ".gz")
    return Head(path, read_start(path, HEAD_BYTES), suffixes)


def sniff(path: Path) -> Format:
    """Return the format of an existing input. Raises ``FormatError`` for an unknown or empty input."""
    head = _read_head(path)
    if not head.is_directory and not head.data:
        expected = _by_suffix(head)
        raise FormatError(
            "the file is empty",
            code=expected.empty_code if expected else "",
            path=str(path),
            hint="check that the program that wrote it was not interrupted",
        )
    best_score, best = _best_by_content(head)
    if best and best_score >= _CERTAIN_ENOUGH:
        return best
    if best is None:
        _refuse_ambiguous(head)
    likeliest = _by_suffix(head) or best
    if likeliest:
        return likeliest
    hint = f"state its format with `source_format`, one of: {', '.join(format_names())}"
    if head.data[257:262] == b"ustar":
        hint = f"unpack the archive, and name its folder: tar xf {path.name}"
    if head.is_directory:
        hint = "name a file in it: a folder must hold the files of one job, one or more per rank"
    raise FormatError("no known format fits this input", path=str(path), hint=hint)


def _refuse_ambiguous(head: Head) -> None:
    """Raise ``FormatError`` if the suffix of an input of unknown content belongs to several formats."""
    suffix = head.suffixes[-1] if head.suffixes else ""
    fitting = [entry.name for entry in usable_formats() if entry.read and suffix in entry.suffixes]
    if len(fitting) > 1:
        raise FormatError(
            f"{suffix} files may be {', '.join(fitting)}, and the content looks like none of them: it begins "
            f"with {head.data[:16]!r}",
            path=str(head.path),
            position="byte 0",
            hint=f"state the format to see what is wrong: `source_format={fitting[-1]}`",
        )


def _by_suffix(head: Head) -> Format | None:
    """Return the first format with the suffix of the input."""
    suffix = head.suffixes[-1] if head.suffixes else ""
    return next((entry for entry in usable_formats() if entry.read and suffix in entry.suffixes), None)


def _best_by_content(head: Head) -> tuple[int, Format | None]:
    best_score, best = 0, None
    for entry in usable_formats():
        score = _score(entry, head)
        if score >= _CERTAIN:
            return score, entry
        if score > best_score:
            best_score, best = score, entry
    return best_score, best


def is_recognised(path: Path) -> bool:
    """Return True if the format of an existing input is recognised by its content, or by content and suffix
    together.

    Only recognised files of a folder are read. A damaged input is not recognised.
    """
    try:
        head = _read_head(path)
    except FormatError:
        return False
    score, best = _best_by_content(head)
    agrees = best is not None and head.suffixes[-1:] and head.suffixes[-1] in best.suffixes
    return score >= (_CERTAIN_ENOUGH if agrees else _CERTAIN)


def is_flat(metadata: Mapping[str, str], origin: Format) -> bool:
    """Return True if a workload that was read from the format ``origin`` has no zero-cost operations.

    That is the case if ``origin`` is flat, or if the workload came from a flat format before it was saved as
    ``origin`` (stated in its ``metadata``). A conversion to a flat format then omits nothing.
    """
    first = metadata.get("format", "")
    return origin.flat or (first in BUILTIN and load_format(first).flat)


def find_format(path: Path, name: str | None, *, workload: bool = False) -> Format:
    """Return the format for reading ``path``: the format ``name``, or the recognised format if ``name`` is
    None.

    With ``workload`` return the format that reads a file of the recognised format as a workload.
    """
    try:
        exists = input_location(path).exists()
    except OSError as error:  # a name too long, a folder that may not be entered
        raise FormatError(error.strerror or str(error), path=str(path), hint="check the path") from error
    if not exists:
        raise FormatError("no such file or directory", path=str(path), hint="check the path")
    refuse_special_files(path)
    chosen = load_format(name) if name else sniff(path)
    if workload and not name and chosen.as_workload:
        chosen = load_format(chosen.as_workload)
    if chosen.read is None:
        raise UsageError(
            f"format {chosen.name!r} can only be written",
            path=str(path),
            hint="choose a format that can be read: hespas-convert --list-formats",
        )
    return chosen


def format_for_output(path: Path, name: str | None, *, profile: bool | None = None) -> Format:
    """Return the format for writing ``path``: the format ``name``, or the format of the suffix if ``name`` is
    None.

    A path without suffix is a directory of Chakra traces. If several formats fit, the longest suffix is
    chosen. If that is still ambiguous, ``profile`` decides: the value is a profile, a workload, or (None)
    either.
    """
    if name:
        chosen = load_format(name)
        if chosen.write is None:
            raise _not_written(chosen, path)
        return chosen
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    if not suffixes:
        return load_format("chakra")
    fitting: list[Format] = []
    for ending in ("".join(suffixes[first:]) for first in range(len(suffixes))):
        fitting += [entry for entry in usable_formats() if ending in entry.suffixes]
        writable = [entry for entry in fitting if entry.write]
        if writable:
            return next((entry for entry in writable if profile in (None, entry.profiles)), writable[0])
    if fitting:
        raise _not_written(fitting[0], path)
    raise UsageError(
        f"no writable format has the suffix {suffixes[-1]!r}",
        path=str(path),
        hint=f"name it with `target_format`, one of: {_writable()}",
    )


def _not_written(entry: Format, path: Path) -> UsageError:
    return UsageError(
        f"format {entry.name!r} can be read, not written",
        path=str(path),
        hint=f"name another with `target_format`, one of: {_writable()}",
    )


def _writable() -> str:
    return ", ".join(entry.name for entry in usable_formats() if entry.write)


_OPTION_INPUTS: Mapping[str, tuple[str, str]] = {
    "dims": ("has no symbolic dimensions", "StableHLO programs"),
    "capture": ("replays no captured graphs", "traces of PyTorch's profiler"),
    "comm_groups": ("states its process groups itself", "Chakra traces"),
    "run_time_unit": ("states the unit of its times", "Chakra traces"),
}
"""Reading option of some formats only -> a fact about other formats, and the inputs that it is for."""


def refuse_unused_options(options: ReadOptions, chosen: Format, path: Path) -> None:
    """Raise ``UsageError`` for an option that the format does not use (``Format.reads_options``)."""
    for name, (fact, inputs) in _OPTION_INPUTS.items():
        if getattr(options, name) and name not in chosen.reads_options:
            hint = f"leave `{name}` out: it is for {inputs}"
            raise UsageError(f"format {chosen.name!r} {fact}", path=str(path), hint=hint)


_RANK_FILE = re.compile(r"\.[0-9]+\.(et|json)(\.gz)?$")
_MOST_FILES = 200
"""Largest number of files that are examined next to the rank files."""


def note_unread_files(path: Path, chosen: Format, diagnostics: Diagnostics) -> None:
    """Report the workloads and profiles of other formats in a folder that is read as ``chosen``.

    Subfolders are searched too, unless ``chosen`` reads no files there. Nothing is reported if the input is a
    file.
    """
    if not path.is_dir():
        return
    others = _recognised(path.iterdir(), chosen)
    if not chosen.flat and not any(_is_same_tool(form, chosen) for _, form in others):
        others += _recognised(path.glob("*/*"), chosen)
    unread = [
        f"{entry.relative_to(path)} ({form.name})"
        for entry, form in others
        if not _is_same_tool(form, chosen)
    ]
    shown = ", ".join(unread[:3]) + (" ..." if len(unread) > 3 else "")
    diagnostics.warning(
        "input.left-out", str(path), f"read as {chosen.name}, without {shown}", count=len(unread)
    )


def _recognised(entries: Iterable[Path], chosen: Format) -> list[tuple[Path, Format]]:
    """Return the files of a folder that have a known format, with that format, except rank files. Their
    number is limited.
    """
    files = (
        entry
        for entry in sorted(entries)
        if entry.is_file() and not (chosen.flat and _RANK_FILE.search(entry.name) is not None)
    )
    return [(entry, sniff(entry)) for entry in islice(files, _MOST_FILES) if is_recognised(entry)]


def _is_same_tool(form: Format, chosen: Format) -> bool:
    """Return True if both formats belong to the same tool. A folder with files of one may then contain files
    of the other.
    """
    module = BUILTIN.get(chosen.name, "").partition(":")[0]
    return form.name == chosen.name or (
        not chosen.flat and BUILTIN.get(form.name, "").startswith(f"{module}:")
    )
