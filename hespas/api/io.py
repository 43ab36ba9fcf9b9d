"""Read any input, write any output: the registry, options and atomic placement in two functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hespas.converters import (
    ReadOptions,
    Value,
    WriteOptions,
    find_format,
    format_for_output,
    is_recognised,
    note_unread_files,
)
from hespas.files.output import check_destination, write_atomically
from hespas.graph import Diagnostics, DType, Profile, Workload, find_dtype
from hespas.graph.errors import InvariantError, UnsupportedError, UsageError
from hespas.graph.passes import with_default_dtype

__all__ = ["check_version", "read", "read_profiles", "write"]


def read(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 # the word users know
    options: ReadOptions | None = None,
    diagnostics: Diagnostics | None = None,
    workload: bool = False,
) -> Value:
    """Read a file or a directory of per-rank files; the format is sniffed unless named. ``workload`` prefers
    one where a file can be read as a profile or as a workload, as a trace of PyTorch's profiler can.

    Raises ``FormatError`` for unreadable or malformed input, ``UnsupportedError`` for what this version
    cannot handle, ``UsageError`` for an unknown format name.
    """
    source = Path(path)
    chosen = find_format(source, format, workload=workload)
    if chosen.read is None:
        raise InvariantError(f"format {chosen.name} was chosen for reading and cannot read")
    settings = options or ReadOptions()
    check_version(settings.version, chosen.read_versions, chosen.name, "--from-version")
    found = diagnostics if diagnostics is not None else Diagnostics()
    note_unread_files(source, chosen, found)
    element = _default_dtype(settings.default_dtype)
    if settings.dims and chosen.name != "stablehlo":
        raise UsageError(
            f"format {chosen.name!r} has no symbolic dimensions",
            path=str(source),
            hint="leave --dim out: it is for StableHLO programs",
        )
    value = chosen.read(source, settings, found)
    return value if element is None else _with_default_dtype(value, element, str(path), found)


def _default_dtype(name: str) -> DType | None:
    element = find_dtype(name) if name else None
    if name and element is None:
        raise UsageError(f"unknown element type {name!r}", hint="write bf16, f16, f32, f8E4M3FN, i8, ...")
    return element


def _with_default_dtype(value: Value, element: DType, path: str, diagnostics: Diagnostics) -> Value:
    """The value whose operations of unknown element type have this one."""
    if not isinstance(value, Workload):
        return value
    made = [with_default_dtype(graph, element.code) for graph in value.classes]
    message = f"operations state no element type and are taken to compute in {element.name}, as asked"
    diagnostics.info("read.default-dtype", path, message, count=sum(count for _, count in made))
    return replace(value, classes=tuple(graph for graph, _ in made))


def read_profiles(
    path: str | Path, *, options: ReadOptions | None = None, diagnostics: Diagnostics | None = None
) -> list[Profile]:
    """The measured profiles of a file, or of a folder with one per rank, in order of ranks.

    A folder that is read as one workload of its files, as that of PyTorch's profiler, holds a profile in each
    file that is one. Raises what :func:`read` does, and ``UsageError`` for what is a program.
    """
    source = Path(path)
    origin = find_format(source, None)
    files = [source]
    if source.is_dir():
        near = sorted([*source.glob("*"), *source.glob("*/*")])
        ranks = [entry for entry in near if entry.is_file() and is_recognised(entry)]
        files = [entry for entry in ranks if find_format(entry, None).as_workload == origin.name] or files
    found: list[Profile] = []
    for file in files:
        value = read(file, options=options, diagnostics=diagnostics)
        if not isinstance(value, Profile):
            raise UsageError("expected a measured profile, and this is a program", path=str(file))
        found.append(value)
    return sorted(found, key=lambda each: int(each.rank.min()) if len(each) else 0)


def write(
    value: Value,
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 # the word users know
    overwrite: bool = False,
    options: WriteOptions | None = None,
    diagnostics: Diagnostics | None = None,
    check: Callable[[Path], None] | None = None,
) -> int:
    """Write a value; the format follows from the suffix unless named. Returns the bytes written.

    The destination appears whole or not at all. ``check`` is called with the path of what is written before
    it replaces anything: what it raises leaves the destination as it was. Raises ``OutputError`` where it
    exists already (without ``overwrite``) or cannot be written, ``UnsupportedError`` where the format cannot
    express the value.
    """
    destination = Path(path)
    chosen = format_for_output(destination, format, profile=isinstance(value, Profile))
    writer = chosen.write
    if writer is None:
        raise InvariantError(f"format {chosen.name} was chosen for writing and cannot write")
    check_destination(destination, overwrite=overwrite)
    if isinstance(value, Profile) and chosen.profiles and not len(value):
        raise UnsupportedError(
            f"no event of a device was recorded, and format {chosen.name!r} holds nothing else",
            hint="record what the device does too; hespas view SOURCE shows what there is",
        )
    settings = options or WriteOptions()
    check_version(settings.version, chosen.write_versions, chosen.name, "--to-version")
    settings = replace(
        settings,
        name=settings.name or destination.name,
        directory=settings.directory or _names_directory(path, destination),
    )
    found = diagnostics if diagnostics is not None else Diagnostics()

    def fill(temporary: Path) -> None:
        writer(value, temporary, settings, found)
        if check is not None:
            check(temporary)

    return write_atomically(
        destination, fill, overwrite=overwrite, directory=chosen.writes_directory(value, settings)
    )


def check_version(version: str, known: tuple[str, ...], name: str, option: str) -> None:
    """Refuse a version that a format does not have. Raises ``UsageError`` listing those it has."""
    if not version or version in known:
        return
    listed = f"one of: {', '.join(known)}" if known else "leave it out: the format has one version"
    raise UsageError(f"{option} {version}: format {name!r} has no such version", hint=listed)


def _names_directory(given: str | Path, destination: Path) -> bool:
    """Whether a destination is spelled like a directory: a closing slash, no suffix, or there already."""
    return str(given).endswith("/") or destination.is_dir() or not destination.suffix
