"""A program of JAX run here under its profiler, and what its profile says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from hespas.api.arguments import checked
from hespas.api.capture_check import validate_capture
from hespas.api.io import Document, Result, findings
from hespas.api.joining import join_profile
from hespas.captures.jax.run import run_profiled
from hespas.captures.mesh import Mesh
from hespas.captures.partition import TIMEOUT_S
from hespas.files.documents import Count, Figure, document_bytes
from hespas.files.output import check_destination, write_atomically
from hespas.graph import Diagnostics, Renamed

if TYPE_CHECKING:
    import pandas

__all__ = ["ProfiledProgram", "ProfiledProgramDocument", "RuleShare", "profile_program"]


_GLOBAL = "stablehlo.global-program"
"""That the program is of the whole mesh, which was asked for."""


class RuleShare(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the device time that finds its operations by one kind of evidence."""

    rule: str
    share: Figure


class ProfiledProgramDocument(Document, frozen=True, kw_only=True):
    """``report.json`` of a profiled program. Times are of all devices; ``differences`` are those of the
    compiled program from what ran.
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
    """``joined_share`` of the device time finds operations of the program, by the evidence in ``joined_by``;
    ``is_what_ran`` says whether the compiled program is that of the profile.
    """

    program: str
    mesh: Mesh
    steps: int
    device_time_ns: float
    joined_share: float
    joined_by: tuple[tuple[str, float], ...]
    groups: int
    is_what_ran: bool
    differences: int
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    def headline(self) -> str:
        """What came of the run, in a line."""
        verdict = "what ran" if self.is_what_ran else f"not what ran ({self.differences:,} differences)"
        time_ms = self.device_time_ns / 1e6
        return (
            f"{self.program}: ran {self.steps} steps on {self.mesh}, {time_ms:,.3f} ms of devices, "
            f"{self.joined_share:.1%} of it joined; the compiled program is {verdict}"
        )

    def document(self) -> ProfiledProgramDocument:
        """The document as a value."""
        return ProfiledProgramDocument(
            inputs=[],
            diagnostics=findings(self.diagnostics),
            program=self.program,
            mesh=str(self.mesh),
            steps=self.steps,
            device_time_ns=self.device_time_ns,
            joined_share=self.joined_share,
            joined_by=[RuleShare(rule=rule, share=share) for rule, share in self.joined_by],
            groups=self.groups,
            is_what_ran=self.is_what_ran,
            differences=self.differences,
        )

    def to_json(self) -> bytes:
        """The document of ``report.json``: ``hespas.capture-profile/1``."""
        return document_bytes(self.document())

    def to_pandas(self) -> pandas.DataFrame:
        """The joined share of the device time by evidence, a row each."""
        import pandas

        return pandas.DataFrame(list(self.joined_by), columns=["rule", "share"])


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
    """Run ``module:function`` of JAX for so many steps on devices of this host, as many as ``mesh`` has,
    under JAX's profiler. The ``folder`` gets ``program.mlir`` (StableHLO with names), ``compiled.hlo``,
    ``profile.xplane.pb``, and ``report.json``: what of the device time joins to the program, and whether the
    compiled one is what ran.

    Raises ``UsageError`` for what the user's code raises, ``UnsupportedError`` for a mesh of more than 64
    devices, ``OutputError`` where the folder cannot be written.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    devices, place, made = Mesh.of(mesh), Path(folder), list[ProfiledProgram]()

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
        told = Renamed(found, str(temporary), str(place), without=(_GLOBAL,))
        joined = join_profile(files.program, files.profile, diagnostics=told)
        checked = validate_capture(files.compiled, files.profile, diagnostics=told)
        shares = {rule: time / joined.time_ns for rule, time in joined.by_rule.items() if joined.time_ns}
        done = ProfiledProgram(
            program=joined.program,
            mesh=devices,
            steps=steps,
            device_time_ns=joined.time_ns,
            joined_share=joined.share,
            joined_by=tuple(shares.items()),
            groups=joined.groups,
            is_what_ran=checked.equal,
            differences=checked.result.differences,
            diagnostics=found,
        )
        (temporary / "report.json").write_bytes(done.to_json())
        made.append(done)

    check_destination(place, overwrite=overwrite)
    write_atomically(place, fill, overwrite=overwrite, directory=True)
    return made[-1]
