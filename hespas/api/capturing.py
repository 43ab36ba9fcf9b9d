"""Captured programs: a JAX or PyTorch program as a workload, its profiled run, and the join of both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from hespas.api.arguments import Destination, DestinationFormat, checked
from hespas.api.documents import Document, Result, findings
from hespas.api.io import read, write
from hespas.api.lowering import refuse_global
from hespas.api.validation import read_program
from hespas.captures.jax.calls import name_of, resolve_arguments, unwrap_partial
from hespas.captures.jax.lowering import LoweredProgram, Platform, lower
from hespas.captures.jax.run import run_profiled
from hespas.captures.partition import (
    TIMEOUT_S,
    CapturedProgram,
    MeshCollectiveRow,
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
from hespas.graph import Diagnostics, Profile, Renamed, Workload
from hespas.graph.deprecation import RenamedAttribute, renamed_arguments
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.hints import AtLeast, Option, OptionsOf
from hespas.graph.mesh import JaxMesh, Mesh
from hespas.graph.passes import totals
from hespas.report import Column, Table, table_from_records, table_from_rows
from hespas.report.texts import counted

if TYPE_CHECKING:
    from hespas.validators.accuracy import Joined

__all__ = [
    "CaptureDocument",
    "CaptureResult",
    "CollectiveDocument",
    "Framework",
    "ProfiledProgram",
    "ProfiledProgramDocument",
    "RuleShare",
    "capture",
    "join_profile",
    "profile_program",
]

Framework = Literal["auto", "jax", "torch"]
"""Framework of a captured function; ``auto`` selects it from the names in the function's module."""

_GLOBAL_PROGRAM = "stablehlo.global-program"
"""Diagnostic that a program is of the whole mesh, which is expected here."""


class CollectiveDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one kind over the same axes of the mesh, of one rank in one step; payload in bytes."""

    kind: str
    axes: str
    groups: Count
    group_size: Count
    times: Figure
    size_bytes: Figure


class CaptureDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas capture --json``. FLOPs and bytes are of one rank of the first class."""

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
    """Captured program. ``program`` is the StableHLO of the whole mesh (MLIR bytecode) and ``spmd_hlo`` the
    HLO of one device; both are empty for frameworks without them.
    """

    workload: Workload
    mesh: Mesh
    framework: str
    program: bytes
    spmd_hlo: str
    diagnostics: Diagnostics
    written: str = ""
    written_bytes: int = 0
    partitioned = RenamedAttribute("spmd_hlo")

    @property
    def collectives(self) -> list[MeshCollectiveRow]:
        """Return the collectives of a rank of the first class, by kind and axes of the mesh."""
        return collective_rows(self.workload, self.mesh)

    def headline(self) -> str:
        """Return the summary line: the name, the ranks, the mesh and the number of operations."""
        graph = self.workload.classes[0]
        classes = f" in {len(self.workload.classes)} classes" if len(self.workload.classes) > 1 else ""
        ranks = counted(self.workload.num_ranks, "rank")
        return f"{self.workload.name}: {ranks}{classes} on {self.mesh}, {len(graph):,} ops"

    def write_program(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the program of the whole mesh. The suffix selects the format (``.mlir``: text).

        Raises ``UsageError`` if the framework has no such program, ``OutputError`` if the file cannot be
        written.
        """
        if not self.program:
            raise UsageError(
                f"a capture of {self.framework} has no program of the whole mesh",
                hint="write the captured workload instead",
            )
        form = form_of_name(Path(path).name, "")
        data = in_form(self.program, ProgramForm.BYTECODE, form, "", load_bindings())
        _write_bytes(Path(path), data, overwrite=overwrite)

    def write_partitioned(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the HLO of one device. Raises what :meth:`write_program` raises."""
        if not self.spmd_hlo:
            raise UsageError(
                f"a capture of {self.framework} has no partitioned program",
                hint="write the captured workload instead",
            )
        _write_bytes(Path(path), self.spmd_hlo.encode(), overwrite=overwrite)

    def document(self) -> CaptureDocument:
        """Return the content of the command's ``--json`` as a typed value."""
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
        """Return the JSON document that ``--json`` writes, of schema ``hespas.capture/1``."""
        return document_bytes(self.document())

    def table(self) -> Table:
        """Return the collectives of a rank: one row per kind and axes."""
        return table_from_records([row._asdict() for row in self.collectives], MeshCollectiveRow._fields)


def _write_bytes(path: Path, data: bytes, *, overwrite: bool) -> None:
    check_destination(path, overwrite=overwrite)

    def fill(temporary: Path) -> None:
        with open_output(temporary, packed=path.suffix == ".gz") as stream:
            stream.write(data)

    write_atomically(path, fill, overwrite=overwrite, directory=False)


_PROGRAM, _PARTITION = "Program", "Partitioning"
"""Headings of ``--help``."""


def _axes_of(text: str) -> tuple[str, ...]:
    """Parse names of axes: ``data,model``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


_Function = Annotated[
    Callable[..., object] | str,
    Option(
        "Function to capture; MODULE may be FILE.py.",
        metavar="MODULE:FUNCTION",
        is_argument=True,
        default_text="",
    ),
]
_Mesh = Annotated[
    Mapping[str, int] | str | JaxMesh,
    Option("Set the mesh, outermost axis first: data=64,model=8.", metavar="AXIS=N,..."),
]
_Args = Annotated[
    str | Callable[..., object] | None,
    Option(
        "JAX: set argument types ('bf16[8192,1024]@data,model; i32[8192]@data'), or a function that "
        "makes them from the mesh.",
        metavar="TYPES|NAME",
        panel=_PROGRAM,
    ),
]
_Framework = Annotated[Framework, Option("Set the framework of the program.", panel=_PROGRAM)]
_Platform = Annotated[Platform | None, Option("JAX: lower for this platform.", panel=_PROGRAM)]
_Explicit = Annotated[
    Sequence[str],
    Option(
        "JAX: make these mesh axes explicit (AxisType.Explicit).",
        metavar="AXIS,...",
        panel=_PROGRAM,
        parse=_axes_of,
    ),
]
_RealTensors = Annotated[
    bool, Option("PyTorch: run on real data, if the model fits in memory.", panel=_PROGRAM)
]
_Compiled = Annotated[
    bool, Option("PyTorch: capture the graphs of torch.compile before fusion.", panel=_PROGRAM)
]
_Partitioner = Annotated[Partitioner, Option("Propagate shardings with this partitioner.", panel=_PARTITION)]
_CompileFor = Annotated[
    str,
    Option(
        "JAX: capture the program as compiled for this target: gpu:h100:8, tpu:v5p:8x8x8, ... "
        "(extras jax-gpu, jax-tpu).",
        metavar="TARGET",
        panel=_PARTITION,
    ),
]
_Timeout = Annotated[
    float,
    AtLeast(1.0),
    Option("Limit the time of partitioning in seconds.", flag="timeout", metavar="S", panel=_PARTITION),
]
_OnUnknown = Annotated[
    Literal["warn", "error"],
    Option(
        "Handle control flow that depends on unknown values: warn, or fail (exit code 4).", flag="missing"
    ),
]
_Writing = Annotated[WriteOptions | None, OptionsOf(("only_classes", "shard", "jobs"))]


@renamed_arguments(missing="on_unknown")
@checked()
def capture(
    function: _Function,
    *arguments: object,
    mesh: _Mesh,
    args: _Args = None,
    keywords: Mapping[str, object] | None = None,
    framework: _Framework = "auto",
    platform: _Platform = None,
    explicit: _Explicit = (),
    real_tensors: _RealTensors = False,
    compiled: _Compiled = False,
    partitioner: _Partitioner = "auto",
    compile_for: _CompileFor = "",
    timeout_s: _Timeout = TIMEOUT_S,
    on_unknown: _OnUnknown = "warn",
    destination: Destination = None,
    format: DestinationFormat = None,  # noqa: A002 # the word users know
    options: _Writing = None,
    overwrite: bool = False,
    diagnostics: Diagnostics | None = None,
) -> CaptureResult:
    """Capture a JAX or PyTorch function (or ``module:function``) on a mesh, ``{"data": 64, "model": 8}``,
    and write it to ``destination`` if given. The devices of the mesh need not exist.

    PyTorch: the function gets a ``DeviceMesh`` and ``arguments``, makes the model and returns the step
    (:func:`hespas.captures.torch.capture_torch`). ``real_tensors=True`` runs the function on real data
    instead of fake tensors; ``compiled=True`` records the graphs of AOTAutograd.
    JAX: ``arguments`` are arrays or abstract arrays with shardings. Instead of them, ``args`` describes the
    arguments as text (``bf16[8192,1024]@data,model; i32[8192]@data``), or is a function that makes them for
    the mesh. Without either, the function gets only the mesh and returns the step with its arguments.
    ``explicit`` names the mesh axes with explicit sharding. ``compile_for`` (``gpu:h100:8``,
    ``tpu:v5p:8x8x8``) returns the schedule of that compiler instead of the output of the partitioner.

    Raises ``UsageError`` for a function that cannot be traced, ``UnsupportedError`` for a program that
    cannot be partitioned or, with ``on_unknown="error"``, whose control flow depends on the value of a tensor
    without data, ``MissingExtraError`` without JAX or PyTorch.

    Examples:
        >>> hespas.capture("jax.numpy:dot", mesh={"data": 4}, args="bf16[1024,512]@data; bf16[512,64]")
        <CaptureResult: jit_dot: 4 ranks on data=4, 3 ops>
    """
    sink = diagnostics if diagnostics is not None else Diagnostics()
    devices = Mesh.of(mesh)
    if arguments and args is not None:
        raise UsageError("arguments are given as values and in `args`", hint="leave `args` out")
    if destination is not None:
        check_destination(Path(destination), overwrite=overwrite)
    job = _CaptureJob(
        devices, args, keywords or {}, platform, explicit, partitioner, compile_for, timeout_s, sink
    )
    chosen = load_function(function) if isinstance(function, str) else function
    if not callable(chosen):
        raise UsageError(
            f"{type(chosen).__name__} is not a function", hint="give a function or MODULE:FUNCTION"
        )
    name = _framework_of(chosen) if framework == "auto" else framework
    if name == "torch":
        program = job.capture_torch(chosen, arguments, real=real_tensors, compiled=compiled)
    else:
        module = function if isinstance(function, str) else f"{unwrap_partial(chosen).__module__}:"
        program = job.capture_jax(chosen, arguments, module, real=real_tensors, compiled=compiled)
    if on_unknown == "error":
        refuse_global(program.workload)
    written_bytes = 0
    if destination is not None:
        written_bytes = write(
            program.workload,
            destination,
            format=format,
            overwrite=overwrite,
            options=options,
            diagnostics=sink,
        )
    return CaptureResult(
        workload=program.workload,
        mesh=devices,
        framework=name,
        program=program.program,
        spmd_hlo=program.partitioned,
        diagnostics=sink,
        written="" if destination is None else str(destination),
        written_bytes=written_bytes,
    )


def _framework_of(function: Callable[..., object]) -> Literal["jax", "torch"]:
    """Return ``torch`` if the module of the function has names of PyTorch and none of JAX, otherwise
    ``jax``.
    """
    bare = unwrap_partial(function)
    module = sys.modules.get(bare.__module__) if hasattr(bare, "__module__") else None
    values = list(vars(module).values()) if module is not None else [bare]
    packages = {
        str(getattr(value, "__module__", None) or getattr(value, "__name__", "")).partition(".")[0]
        for value in values
    }
    return "torch" if "torch" in packages and not packages & {"jax", "jaxlib", "flax", "equinox"} else "jax"


@dataclass(frozen=True, slots=True)
class _CaptureJob:
    """Options of capturing a function: mesh, arguments and compilation settings."""

    mesh: Mesh
    args: str | Callable[..., object] | None
    keywords: Mapping[str, object]
    platform: Platform | None
    explicit: Sequence[str]
    partitioner: Partitioner
    compile_for: str
    timeout_s: float
    diagnostics: Diagnostics

    def capture_torch(
        self, function: Callable[..., object], arguments: Sequence[object], *, real: bool, compiled: bool
    ) -> CapturedProgram:
        """Capture a PyTorch program, which has no program of the whole mesh."""
        from hespas.captures.torch import capture_torch

        for option in ("args", "keywords", "platform", "explicit", "compile_for"):
            if getattr(self, option):
                hint = "create the data in your function" if option == "args" else "leave it out"
                raise UsageError(
                    f"`{option}` applies to programs of JAX only, and this is a function of PyTorch",
                    hint=hint,
                )
        with user_code(f"capturing {name_of(function)}"):
            workload = capture_torch(
                function,
                self.mesh,
                *arguments,
                name=name_of(function),
                diagnostics=self.diagnostics,
                tensors="real" if real or compiled else "fake",
                compiled=compiled,
            )
        return CapturedProgram(workload, b"", "")

    def capture_jax(
        self,
        function: Callable[..., object],
        arguments: Sequence[object],
        module: str,
        *,
        real: bool,
        compiled: bool,
    ) -> CapturedProgram:
        """Capture a JAX program, partitioned or compiled. ``module`` is where names in ``args`` are looked
        up.
        """
        for option, value in {"real_tensors": real, "compiled": compiled}.items():
            if value:
                raise UsageError(
                    f"`{option}` applies to programs of PyTorch only, and this is a function of JAX",
                    hint="leave it out",
                )
        lowering = partial(
            lower,
            function,
            arguments or resolve_arguments(self.args, module),
            self.keywords,
            self.mesh,
            explicit=self.explicit,
            diagnostics=self.diagnostics,
        )
        if self.compile_for:
            from hespas.captures.aot import Target, compile_for, workload_of_compiled

            target = Target.of(self.compile_for)
            lowered = lowering(platform=self.platform or ("cuda" if target.platform == "gpu" else "tpu"))
            executable = compile_for(
                lowered.program, target, self.mesh, diagnostics=self.diagnostics, timeout_s=self.timeout_s
            )
            workload = workload_of_compiled(executable, self.diagnostics)
            metadata = {**workload.metadata, "framework": "jax"}
            return CapturedProgram(replace(workload, metadata=metadata), lowered.program, executable.hlo)
        if self.partitioner != "auto":
            return self._partitioned(lowering, shardy=self.partitioner == "shardy")
        end = monotonic() + self.timeout_s
        try:
            return self._partitioned(lowering, shardy=True)
        except UnsupportedError as error:
            if monotonic() >= end:
                raise
            message = f"{error.text}; GSPMD propagates shardings instead"
            self.diagnostics.warning("capture.fallback", "partitioner", message)
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
            diagnostics=self.diagnostics,
        )


@renamed_arguments(measured="profile")
def join_profile(
    program: str | Path | bytes | Workload,
    profile: str | Path | Profile,
    *,
    diagnostics: Diagnostics | None = None,
) -> Joined:
    """Join a profile with the program that ran. ``program`` is a file, a workload, or the text of a program
    as ``bytes`` (``lowered.as_text().encode()``, with or without names). Needs no device, because nothing is
    estimated.

    The result has the share of the device time that is matched with operations, the evidence of each match,
    and a flag if another program ran (``is_other_program``). If one event covers several operations, its time
    is not divided among them. Raises the errors of ``read``, and ``UsageError`` if program and profile are
    interchanged.
    """
    from hespas.validators.accuracy import join_program

    sink = diagnostics if diagnostics is not None else Diagnostics()
    if isinstance(program, bytes):
        with TemporaryDirectory(prefix="hespas-") as folder:
            path = Path(folder) / "program"
            path.write_bytes(program)
            workload = read_program(path, sink)
    else:
        workload = read_program(program, sink)
    recorded = profile if isinstance(profile, Profile) else read(profile, diagnostics=sink)
    if not isinstance(recorded, Profile):
        raise UsageError(
            "expected a profile, and this is a program", path=str(profile), hint="give it as `program`"
        )
    if workload is None:
        raise UsageError(
            "no program to compare with the profile", hint="give the program that ran as `program`"
        )
    return join_program(workload, recorded, sink)


class RuleShare(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the device time whose events are matched with operations by one kind of evidence, such as
    equal names.
    """

    rule: str
    share: Figure


class ProfiledProgramDocument(Document, frozen=True, kw_only=True):
    """Document ``report.json`` of a profiled program. Times are sums over all devices. ``differences`` counts
    the differences between the compiled program and the profile.
    """

    schema: Literal["hespas.capture-profile/1"] = "hespas.capture-profile/1"
    program: str
    mesh: str
    steps: Count
    device_time_ns: Figure
    joined_share: Figure
    joined_by: list[RuleShare]
    groups: Count
    is_what_ran: bool
    differences: Count


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProfiledProgram(Result):
    """Program that ran under a profiler. ``matched_fraction`` is the share of the device time that is matched
    with operations of the program. ``joined_by`` divides this share by the evidence of the match.
    ``matches_profile`` is True if the compiled program is the program in the profile.
    """

    program: str
    mesh: Mesh
    steps: int
    device_time_ns: float
    matched_fraction: float
    joined_by: tuple[tuple[str, float], ...]
    groups: int
    matches_profile: bool
    differences: int
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    joined_share = RenamedAttribute("matched_fraction")
    is_what_ran = RenamedAttribute("matches_profile")

    def headline(self) -> str:
        """Return the summary line: steps, device time, matched share, and whether the compiled program
        matches the profile.
        """
        if self.matches_profile:
            verdict = "matches the profile"
        else:
            verdict = f"does not match the profile ({self.differences:,} differences)"
        time_ms = self.device_time_ns / 1e6
        return (
            f"{self.program}: ran {self.steps} steps on {self.mesh}, {time_ms:,.3f} ms of device time, "
            f"{self.matched_fraction:.1%} of it joined; the compiled program {verdict}"
        )

    def document(self) -> ProfiledProgramDocument:
        """Return the content of the command's ``--json`` as a typed value."""
        return ProfiledProgramDocument(
            inputs=[],
            diagnostics=findings(self.diagnostics),
            program=self.program,
            mesh=str(self.mesh),
            steps=self.steps,
            device_time_ns=self.device_time_ns,
            joined_share=self.matched_fraction,
            joined_by=[RuleShare(rule=rule, share=share) for rule, share in self.joined_by],
            groups=self.groups,
            is_what_ran=self.matches_profile,
            differences=self.differences,
        )

    def to_json(self) -> bytes:
        """Return the document of ``report.json``: ``hespas.capture-profile/1``."""
        return document_bytes(self.document())

    def table(self) -> Table:
        """Return the matched share of the device time: one row per kind of evidence."""
        return table_from_rows((Column("rule"), Column("share", kind="share")), self.joined_by)


@checked()
def profile_program(
    target: str,
    *,
    mesh: str,
    folder: str | Path,
    args: str = "",
    explicit: Sequence[str] = (),
    steps: int = 3,
    timeout_s: float = TIMEOUT_S,
    overwrite: bool = False,
    diagnostics: Diagnostics | None = None,
) -> ProfiledProgram:
    """Run ``module:function`` of JAX for ``steps`` steps under JAX's profiler, on as many devices of this
    host as ``mesh`` has. ``folder`` gets ``program.mlir`` (StableHLO with names), ``compiled.hlo``,
    ``profile.xplane.pb``, and ``report.json`` with the share of the device time that joins to the program
    and the result of comparing the compiled program with the profile.

    Raises ``UsageError`` for an exception in the user's code, ``UnsupportedError`` for a mesh of more than
    64 devices, ``OutputError`` if the folder cannot be written.

    Examples:
        >>> arguments = "f32[64,64]@data; f32[64,64]"
        >>> done = hespas.profile_program("jax.numpy:dot", mesh="data=2", folder="run", args=arguments)
        >>> done.matches_profile
        True
    """
    from hespas.api.checks import validate_capture

    sink = diagnostics if diagnostics is not None else Diagnostics()
    devices, path, results = Mesh.of(mesh), Path(folder), list[ProfiledProgram]()

    def fill(temporary: Path) -> None:
        temporary.mkdir(exist_ok=True)
        files = run_profiled(
            target,
            devices,
            temporary.resolve(),
            args=args,
            explicit=explicit,
            steps=steps,
            timeout_s=timeout_s,
        )
        renamed = Renamed(sink, str(temporary), str(path), without=(_GLOBAL_PROGRAM,))
        joined = join_profile(files.program, files.profile, diagnostics=renamed)
        check = validate_capture(files.compiled, files.profile, diagnostics=renamed)
        shares = {rule: time / joined.time_ns for rule, time in joined.by_rule.items() if joined.time_ns}
        result = ProfiledProgram(
            program=joined.program,
            mesh=devices,
            steps=steps,
            device_time_ns=joined.time_ns,
            matched_fraction=joined.share,
            joined_by=tuple(shares.items()),
            groups=joined.groups,
            matches_profile=check.equal,
            differences=check.details.differences,
            diagnostics=sink,
        )
        (temporary / "report.json").write_bytes(result.to_json())
        results.append(result)

    check_destination(path, overwrite=overwrite)
    write_atomically(path, fill, overwrite=overwrite, directory=True)
    return results[-1]
