"""A live program as a workload, for any number of devices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Literal

import msgspec

from hespas.api.arguments import checked
from hespas.api.io import Document, Result, findings, write
from hespas.api.preparation import refuse_global
from hespas.captures.jax.calls import name_of, resolve_arguments, unwrap_partial
from hespas.captures.jax.lowering import LoweredProgram, Platform, lower
from hespas.captures.mesh import CollectiveRow, JaxMesh, Mesh
from hespas.captures.partition import (
    TIMEOUT_S,
    CapturedProgram,
    Partitioner,
    capture_program,
    collective_rows,
)
from hespas.captures.target import load_function, user_code
from hespas.converters import WriteOptions
from hespas.converters.stablehlo.mlir import load_bindings
from hespas.converters.stablehlo.program import ProgramForm, form_of_name, in_form
from hespas.files.documents import Count, Figure, document_bytes
from hespas.files.output import check_destination, write_atomically
from hespas.files.streams import open_output
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.passes import totals

if TYPE_CHECKING:
    import pandas

__all__ = ["CaptureDocument", "CaptureResult", "CollectiveDocument", "Framework", "capture"]

Framework = Literal["auto", "jax", "torch"]
"""Whose program a function is; ``auto``: of which its module has the names."""


class CollectiveDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one kind over the same axes of the mesh: of one rank in one step, payload in bytes."""

    kind: str
    axes: str
    groups: Count
    group_size: Count
    times: Figure
    size_bytes: Figure


class CaptureDocument(Document, frozen=True, kw_only=True):
    """What hespas capture --json writes. FLOPs and bytes are those of one rank of the first class."""

    schema: Literal["hespas.capture/1"] = "hespas.capture/1"
    name: str
    framework: str
    mesh: str
    ranks: Count
    classes: Count
    operations: Count
    flops: Figure
    bytes_moved: Figure
    collectives: list[CollectiveDocument]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CaptureResult(Result):
    """A captured program. ``program`` is the StableHLO of the whole mesh (MLIR bytecode) and
    ``partitioned`` the HLO that every device runs, where the framework has them.
    """

    workload: Workload
    mesh: Mesh
    framework: str
    program: bytes
    partitioned: str
    diagnostics: Diagnostics
    written: str = ""
    written_bytes: int = 0

    @property
    def collectives(self) -> list[CollectiveRow]:
        """Collectives of a rank of the first class, by kind and axes of the mesh."""
        return collective_rows(self.workload, self.mesh)

    def headline(self) -> str:
        """The program in a few words."""
        graph = self.workload.classes[0]
        classes = f" in {len(self.workload.classes)} classes" if len(self.workload.classes) > 1 else ""
        ranks = f"{self.workload.num_ranks:,} ranks{classes}"
        return f"{self.workload.name}: {ranks} on {self.mesh}, {len(graph):,} ops"

    def write_program(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the program of the whole mesh in the form that the name asks for (``.mlir``: text).

        Raises ``UsageError`` where the framework has none, ``OutputError`` where it cannot be written.
        """
        if not self.program:
            raise UsageError(f"{self.framework} has no program of the whole mesh", hint="write the workload")
        form = form_of_name(Path(path).name, "")
        data = in_form(self.program, ProgramForm.BYTECODE, form, "", load_bindings())
        _put(Path(path), data, overwrite=overwrite)

    def write_partitioned(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the HLO that every device runs. Raises as :meth:`write_program` does."""
        if not self.partitioned:
            raise UsageError(f"{self.framework} has no partitioned program", hint="write the workload")
        _put(Path(path), self.partitioned.encode(), overwrite=overwrite)

    def document(self) -> CaptureDocument:
        """The document as a value."""
        graph = self.workload.classes[0]
        sums = totals(graph)
        return CaptureDocument(
            inputs=[],
            diagnostics=findings(self.diagnostics),
            name=self.workload.name,
            framework=self.framework,
            mesh=str(self.mesh),
            ranks=self.workload.num_ranks,
            classes=len(self.workload.classes),
            operations=len(graph),
            flops=sums.flops,
            bytes_moved=sums.bytes_moved,
            collectives=[CollectiveDocument(**row._asdict()) for row in self.collectives],
        )

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.capture/1``."""
        return document_bytes(self.document())

    def to_pandas(self) -> pandas.DataFrame:
        """Collectives of a rank, a row for each kind and axes."""
        import pandas

        return pandas.DataFrame(self.collectives, columns=list(CollectiveRow._fields))


@checked()
def capture(
    function: Callable[..., object] | str,
    *arguments: object,
    mesh: Mapping[str, int] | str | JaxMesh,
    args: str | Callable[..., object] | None = None,
    keywords: Mapping[str, object] | None = None,
    framework: Framework = "auto",
    platform: Platform | None = None,
    explicit: Sequence[str] = (),
    partitioner: Partitioner = "auto",
    compile_for: str = "",
    timeout_s: float = TIMEOUT_S,
    real_tensors: bool = False,
    compiled: bool = False,
    missing: Literal["warn", "error"] = "warn",
    destination: str | Path | None = None,
    format: str | None = None,  # noqa: A002 # the word users know
    overwrite: bool = False,
    options: WriteOptions | None = None,
    diagnostics: Diagnostics | None = None,
) -> CaptureResult:
    """Capture a function of JAX or PyTorch (or ``module:function``) on a mesh, ``{"data": 64, "model": 8}``,
    of devices that need not be there, and write it where a ``destination`` is given.

    Of PyTorch: the function gets a ``DeviceMesh`` and ``arguments``, makes the model and returns the step
    (:func:`hespas.captures.torch.capture_torch`); ``real_tensors`` compute, ``compiled`` records graphs of
    AOTAutograd. Of JAX: ``arguments`` are arrays or abstract ones with shardings; ``args`` says them as text
    (``bf16[8192,1024]@data,model; i32[8192]@data``) or is a function that makes them, given the mesh.
    Without either, a function of the mesh alone returns the step with its arguments. ``explicit`` names mesh
    axes that are part of types. ``compile_for`` (``gpu:h100:8``, ``tpu:v5p:8x8x8``) gives what that compiler
    schedules instead of what the partitioner makes. ``missing="error"`` refuses a program whose control flow
    depends on guessed values (``UnsupportedError``). Raises ``UsageError`` for what does not trace,
    ``UnsupportedError`` for what cannot be partitioned, ``MissingExtraError`` without JAX or PyTorch.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    devices = Mesh.of(mesh)
    if arguments and args is not None:
        raise UsageError("arguments are given and described", hint="leave `args` out")
    if destination is not None:
        check_destination(Path(destination), overwrite=overwrite)
    asked = _Asked(
        devices, args, keywords or {}, platform, explicit, partitioner, compile_for, timeout_s, found
    )
    name, done = asked.capture(function, arguments, framework, real=real_tensors, compiled=compiled)
    if missing == "error":
        refuse_global(done.workload)
    put = partial(write, format=format, overwrite=overwrite, options=options, diagnostics=found)
    return CaptureResult(
        workload=done.workload,
        mesh=devices,
        framework=name,
        program=done.program,
        partitioned=done.partitioned,
        diagnostics=found,
        written="" if destination is None else str(destination),
        written_bytes=0 if destination is None else put(done.workload, destination),
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """How a function is to be captured."""

    mesh: Mesh
    args: str | Callable[..., object] | None
    keywords: Mapping[str, object]
    platform: Platform | None
    explicit: Sequence[str]
    partitioner: Partitioner
    compile_for: str
    timeout_s: float
    found: Diagnostics

    def capture(
        self,
        function: Callable[..., object] | str,
        arguments: Sequence[object],
        framework: Framework,
        *,
        real: bool,
        compiled: bool,
    ) -> tuple[str, CapturedProgram]:
        """The framework that the function is of, and what came out."""
        chosen = load_function(function) if isinstance(function, str) else function
        if not callable(chosen):
            raise UsageError(
                f"{type(chosen).__name__} is no function", hint="give a function or MODULE:FUNCTION"
            )
        name = _framework_of(chosen) if framework == "auto" else framework
        if name == "torch":
            return name, self.of_torch(chosen, arguments, real=real, compiled=compiled)
        beside = function if isinstance(function, str) else f"{unwrap_partial(chosen).__module__}:"
        return name, self.of_jax(chosen, arguments, beside, real=real, compiled=compiled)

    def of_torch(
        self, function: Callable[..., object], arguments: Sequence[object], *, real: bool, compiled: bool
    ) -> CapturedProgram:
        """The workload of a program of PyTorch: there is no program of the whole mesh."""
        from hespas.captures.torch import capture_torch

        for option in ("args", "keywords", "platform", "explicit", "compile_for"):
            if getattr(self, option):
                hint = "a function of PyTorch makes its data itself" if option == "args" else "leave it out"
                raise UsageError(f"`{option}` is for programs of JAX", hint=hint)
        with user_code(f"capturing {name_of(function)}"):
            workload = capture_torch(
                function,
                self.mesh,
                *arguments,
                name=name_of(function),
                diagnostics=self.found,
                tensors="real" if real or compiled else "fake",
                compiled=compiled,
            )
        return CapturedProgram(workload, b"", "")

    def of_jax(
        self,
        function: Callable[..., object],
        arguments: Sequence[object],
        beside: str,
        *,
        real: bool,
        compiled: bool,
    ) -> CapturedProgram:
        """The workload of a program of JAX, partitioned or compiled."""
        for option, value in {"real_tensors": real, "compiled": compiled}.items():
            if value:
                raise UsageError(f"`{option}` is for programs of PyTorch", hint="leave it out")
        lowering = partial(
            lower,
            function,
            arguments or resolve_arguments(self.args, beside),
            self.keywords,
            self.mesh,
            explicit=self.explicit,
            diagnostics=self.found,
        )
        if self.compile_for:
            return self._compiled(lowering)
        if self.partitioner != "auto":
            return self._partitioned(lowering, shardy=self.partitioner == "shardy")
        end = monotonic() + self.timeout_s
        try:
            return self._partitioned(lowering, shardy=True)
        except UnsupportedError as error:
            if monotonic() >= end:
                raise
            told = f"{error.text}; GSPMD propagates shardings instead"
            self.found.warning("capture.fallback", "partitioner", told)
        return self._partitioned(lowering, shardy=False)

    def _partitioned(self, lowering: Callable[..., LoweredProgram], *, shardy: bool) -> CapturedProgram:
        lowered = lowering(shardy=shardy, platform=self.platform or "tpu")
        return capture_program(
            lowered.program,
            lowered.name,
            mesh=self.mesh,
            partitioner="shardy" if shardy else "gspmd",
            timeout_s=self.timeout_s,
            metadata={"framework": "jax"},
            diagnostics=self.found,
        )

    def _compiled(self, lowering: Callable[..., LoweredProgram]) -> CapturedProgram:
        """What the compiler for a device makes of the program, lowered for its platform."""
        from hespas.captures.aot import Target, compile_for, workload_of_compiled

        target = Target.of(self.compile_for)
        lowered = lowering(platform=self.platform or ("cuda" if target.platform == "gpu" else "tpu"))
        done = compile_for(
            lowered.program, target, self.mesh, diagnostics=self.found, timeout_s=self.timeout_s
        )
        workload = workload_of_compiled(done, self.found)
        metadata = {**workload.metadata, "framework": "jax"}
        return CapturedProgram(replace(workload, metadata=metadata), lowered.program, done.hlo)


def _framework_of(function: Callable[..., object]) -> Literal["jax", "torch"]:
    """``torch`` where the module of the function has names of PyTorch and none of JAX."""
    bare = unwrap_partial(function)
    module = sys.modules.get(bare.__module__) if hasattr(bare, "__module__") else None
    values = list(vars(module).values()) if module is not None else [bare]
    homes = {
        str(getattr(each, "__module__", None) or getattr(each, "__name__", "")).partition(".")[0]
        for each in values
    }
    return "torch" if "torch" in homes and not homes & {"jax", "jaxlib", "flax", "equinox"} else "jax"


def _put(path: Path, data: bytes, *, overwrite: bool) -> None:
    check_destination(path, overwrite=overwrite)

    def fill(temporary: Path) -> None:
        with open_output(temporary, packed=path.suffix == ".gz") as stream:
            stream.write(data)

    write_atomically(path, fill, overwrite=overwrite, directory=False)
