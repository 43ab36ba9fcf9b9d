"""Kit of conformance cases: made from a seed, written as an archive, and read again."""

from __future__ import annotations

import io
import zipfile
from importlib import resources
from pathlib import Path
from random import Random
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from hespas.files.documents import document_bytes
from hespas.graph.errors import FormatError, UsageError
from hespas.validators.conformance import job_cases, trace_cases
from hespas.validators.conformance.case import Case, ConfiguredCases, KitCase

__all__ = ["KIT_VERSION", "MANIFEST", "Kit", "Manifest", "kit_bytes", "make_kit", "read_kit"]

KIT_VERSION: Final = 1
"""Version of the cases: it rises with every change of a case."""
MANIFEST = "manifest.json"
_SCHEMA: Final = "hespas.conformance/1"
_TIMES = "times.json"
_MOST_BYTES = 64 << 20
_MOST_FILES = 20_000
_RANDOM_JOBS = 8


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of a conformance kit: its version, the seed, and all cases with their expected results."""

    schema: Literal["hespas.conformance/1"] = _SCHEMA
    kit: Annotated[int, Meta(ge=1)]
    seed: Annotated[int, Meta(ge=0)]
    cases: list[Case]


class Kit(msgspec.Struct, frozen=True):
    """Manifest of a kit, and the files of each case."""

    manifest: Manifest
    cases: tuple[KitCase, ...]


def make_kit(seed: int = 0) -> Kit:
    """Make all cases. Equal seeds make equal kits. Another seed makes other random jobs, noise and orders of
    nodes; cases whose time then differs have no ``finish_ns``.
    """
    made = ConfiguredCases()
    random = Random(f"hespas conformance {seed}")
    trace_cases.add_frames(made)
    trace_cases.add_malformed(made, random)
    trace_cases.add_versions(made)
    trace_cases.add_attributes(made)
    trace_cases.add_graphs(made, random)
    trace_cases.add_files(made)
    job_cases.add_collectives(made)
    job_cases.add_messages(made)
    job_cases.add_groups(made)
    job_cases.add_configurations(made)
    job_cases.add_roofline(made)
    job_cases.add_memory(made)
    job_cases.add_algorithms(made)
    job_cases.add_random_jobs(made, random, valid=_RANDOM_JOBS)
    # finish times of all ranks by case, as ASTRA-sim itself printed them for seed 0
    text = resources.files("hespas.validators.conformance").joinpath(_TIMES).read_text(encoding="utf-8")
    times = msgspec.json.decode(text, type=dict[str, list[int]])
    cases = tuple(
        KitCase(
            msgspec.structs.replace(entry.case, finish_ns=times[entry.case.name])
            if entry.case.run == "finish"
            and entry.case.name in times
            and (seed == 0 or entry.case.kind != "random")
            else entry.case,
            entry.files,
        )
        for entry in made.cases
    )
    manifest = Manifest(kit=KIT_VERSION, seed=seed, cases=[entry.case for entry in cases])
    return Kit(manifest, cases)


def kit_bytes(kit: Kit) -> bytes:
    """Return a kit as a ZIP archive without compression, so that its bytes do not depend on a library."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, MANIFEST, document_bytes(kit.manifest))
        for entry in kit.cases:
            for name, content in sorted(entry.files.items()):
                _add(archive, f"{entry.case.name}/{name}", content)
    return packed.getvalue()


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, content)


def read_kit(path: Path) -> Kit:
    """Read an archive. Raises ``FormatError`` if it is not a kit of this schema."""
    hint = "make a kit with hespas-validate conform --out KIT.zip"
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > _MOST_BYTES or len(entries) > _MOST_FILES:
                raise FormatError("the archive is too large for a kit", path=str(path), hint=hint)
            contents = {entry.filename: archive.read(entry) for entry in entries}
        manifest = msgspec.json.decode(contents.pop(MANIFEST), type=Manifest)
    except (zipfile.BadZipFile, KeyError, msgspec.DecodeError, NotImplementedError) as error:
        raise FormatError(f"not a conformance kit: {error}", path=str(path), hint=hint) from error
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", path=str(path), hint=hint) from error
    files: dict[str, dict[str, bytes]] = {case.name: {} for case in manifest.cases}
    for name, content in contents.items():
        folder, _, file = name.rpartition("/")
        if folder not in files or ".." in name.split("/"):
            raise FormatError(f"the manifest has no case for the file {name!r}", path=str(path), hint=hint)
        files[folder][file] = content
    return Kit(manifest, tuple(KitCase(case, files[case.name]) for case in manifest.cases))
