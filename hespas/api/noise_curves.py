"""Noise of analog accelerators: accuracy or signal-to-noise ratio of a program over the noise in its
contractions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from hespas.api.arguments import Seed, checked
from hespas.api.documents import Document, Result, findings
from hespas.converters.format import Dims
from hespas.files.documents import Count, Figure, document_bytes
from hespas.files.limits import limits
from hespas.files.streams import read_bytes
from hespas.files.trust import refuse_in_untrusted
from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError
from hespas.graph.hints import INPUT, AtLeast, AtMost, Option, PositiveInt
from hespas.graph.progress import Progress
from hespas.report import Column, Table, table_from_rows
from hespas.report.texts import count_text, counted
from hespas.validators.noise import KINDS, NoiseKind
from hespas.validators.noise.run import NoiseCurves, NoiseRow, NoiseSettings, SiteRow, run_with_noise

if TYPE_CHECKING:
    from hespas.report.charts import Chart, Mark

__all__ = ["NoiseDocument", "NoiseReport", "noise"]

_MOST_SIGMAS = 1_000
_DEFAULT_POINTS = 7
_UNITS = {"lsb": "LSB", "std": "std"}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class NoiseReport(Result):
    """Curves of a program with noise. ``unit`` is the unit of all sigmas, ``drop`` the loss of accuracy that
    :meth:`tolerated` allows, and ``confidence`` the level of the intervals over ``seeds`` seeds.
    """

    page_title: ClassVar[str] = "Noise"

    program: str
    data: str
    unit: Literal["lsb", "std"]
    seeds: int
    confidence: float
    drop: float
    curves: NoiseCurves
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    @property
    def accuracy(self) -> float:
        """Return the share of correct rows without noise, NaN without labels."""
        return self.curves.accuracy

    @property
    def has_labels(self) -> bool:
        """Return True if the accuracy is known."""
        return isfinite(self.accuracy)

    @property
    def kinds(self) -> tuple[NoiseKind, ...]:
        """Return the kinds of noise that vary."""
        return tuple(dict.fromkeys(row.kind for row in self.curves.rows))

    def curve(self, kind: NoiseKind) -> tuple[NoiseRow, ...]:
        """Return the points of one kind of noise, by sigma."""
        return tuple(row for row in self.curves.rows if row.kind == kind)

    def tolerated(self, kind: NoiseKind) -> float:
        """Return the largest sigma up to which the accuracy is at most ``drop`` below the one without noise,
        interpolated between points; NaN without labels.
        """
        least, before = self.accuracy - self.drop, nan
        curve = self.curve(kind)
        for position, row in enumerate(curve):
            if not row.accuracy >= least:
                if not position or not isfinite(row.accuracy):
                    return nan
                last = curve[position - 1]
                share = (last.accuracy - least) / (last.accuracy - row.accuracy)
                return last.sigma + share * (row.sigma - last.sigma)
            before = row.sigma
        return before

    def headline(self) -> str:
        """Return the summary line: accuracy without noise, and the noise that it tolerates."""
        unit = _UNITS[self.unit]
        ends: dict[NoiseKind, NoiseRow] = {kind: self.curve(kind)[-1] for kind in self.kinds}
        if not self.has_labels:
            ratios = ", ".join(
                f"{row.snr_db:.1f} dB at {kind} noise of {row.sigma:g} {unit}" for kind, row in ends.items()
            )
            return f"{self.program}: SNR of the output {ratios}"
        texts: list[str] = []
        for kind, row in ends.items():
            sigma = self.tolerated(kind)
            beyond = ">= " if sigma == row.sigma else ""
            texts.append(f"{kind} {beyond}{sigma:.2g} {unit}" if isfinite(sigma) else f"{kind} none")
        points = f"{100 * self.drop:g} point" + ("s" if self.drop != 0.01 else "")
        return (
            f"{self.program}: accuracy {self.accuracy:.1%} without noise "
            f"({counted(self.curves.evaluated, 'row')}), within {points} up to {', '.join(texts)}"
        )

    def table(self) -> Table:
        """Return the result as a table with one row per point of a curve."""
        header = (
            Column("noise"),
            *(Column(f"sigma {kind} [{_UNITS[self.unit]}]", kind="number") for kind in KINDS),
            *self._figure_columns(),
        )
        rows = [
            (row.kind, row.sigma_mac, row.sigma_weight, row.sigma_activation, *self._figures(row))
            for row in self.curves.rows
        ]
        return table_from_rows(header, rows)

    def sites_table(self) -> Table:
        """Return the contractions, each with noise alone at the largest sigma; the most sensitive first."""
        header = (
            Column("contraction", kind="code"),
            Column("noise"),
            Column(f"sigma [{_UNITS[self.unit]}]", kind="number"),
            Column("value of a unit", kind="number"),
            Column("unit from"),
            *self._figure_columns(),
        )
        rows = [
            (row.site, row.kind, row.sigma, row.unit, row.origin, *self._figures(row))
            for row in self.curves.sites
        ]
        return table_from_rows(header, rows)

    def _figure_columns(self) -> list[Column]:
        """Return the columns of results, without accuracy if there are no labels."""
        parts = ("", " low", " high")
        columns = [Column(f"accuracy{part}", kind="share") for part in parts] if self.has_labels else []
        return [*columns, *(Column(f"SNR{part} [dB]", kind="number") for part in parts)]

    def _figures(self, row: NoiseRow | SiteRow) -> list[float]:
        """Return the values of the columns of results. The SNR of equal outputs is infinite."""
        values = [row.accuracy, row.accuracy_low, row.accuracy_high] if self.has_labels else []
        return [*values, row.snr_db, row.snr_db_low, row.snr_db_high]

    def tables_by_name(self) -> Mapping[str, Table]:
        """Return the points of the curves, and the contractions."""
        return {"curves": self.table(), "contractions": self.sites_table()}

    def charts(self) -> tuple[Chart, ...]:
        """Return accuracy (with labels) and SNR over sigma, with their intervals."""
        from hespas.report.charts import Axis, Plot, Series

        x = Axis(f"sigma [{_UNITS[self.unit]}]")
        note = f"Means of {counted(self.seeds, 'seed')}, with their confidence intervals."
        plots: list[Chart] = []
        for name, title, y, is_drawn in (
            ("accuracy", "Accuracy over noise", Axis("accuracy", kind="share"), self.has_labels),
            ("snr_db", "SNR of the output over noise", Axis("SNR [dB]"), True),
        ):
            series: list[Series] = []
            for tone, kind in enumerate(self.kinds):
                curve = self.curve(kind)
                sigmas = [row.sigma for row in curve]
                for part in ("", "_low", "_high"):
                    mark: Mark = "guide" if part else "curve"
                    values = [float(getattr(row, name + part)) for row in curve]
                    label = f"{kind}, {self.confidence:.0%} interval" if part else f"{kind} noise"
                    series.append(Series(label=label, x=sigmas, y=values, mark=mark, tone=tone))
            if is_drawn:
                plots.append(Plot(name=name, title=title, note=note, table="curves", x=x, y=y, series=series))
        return tuple(plots)

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.noise/1``."""
        return document_bytes(
            NoiseDocument(
                inputs=[self.program, *([self.data] if self.data else [])],
                diagnostics=findings(self.diagnostics),
                unit=self.unit,
                seeds=self.seeds,
                confidence=self.confidence,
                drop=self.drop,
                evaluated_rows=self.curves.evaluated,
                accuracy=self.accuracy,
                tolerated={kind: self.tolerated(kind) for kind in self.kinds},
                rows=self.curves.rows,
                contractions=self.curves.sites,
            )
        )


class NoiseDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas-validate noise --json``. ``tolerated`` is the largest sigma of each kind at
    which the accuracy is at most ``drop`` lower.
    """

    schema: Literal["hespas.noise/1"] = "hespas.noise/1"
    unit: Literal["lsb", "std"]
    seeds: Count
    confidence: float
    drop: float
    evaluated_rows: Count
    accuracy: Figure
    tolerated: Mapping[NoiseKind, Figure]
    rows: tuple[NoiseRow, ...]
    contractions: tuple[SiteRow, ...]


def _sigmas_of(text: str) -> list[float]:
    """Parse values of sigma: ``0.1``, ``0,0.1,0.3``, ``0:0.3`` (7 points) or ``0:0.3:0.05`` (with a step)."""
    try:
        parts = [float(part) for part in text.split("," if "," in text else ":")]
    except ValueError:
        parts = []
    if not parts or not all(isfinite(part) for part in parts) or (":" in text and len(parts) > 3):
        raise UsageError(
            f"{text!r} is not a list of sigmas", hint="0.1, or 0,0.1,0.3, or 0:0.3, or 0:0.3:0.05"
        )
    if ":" not in text:
        return parts
    low, high = parts[:2]
    steps = (high - low) / parts[2] if len(parts) == 3 and parts[2] else _DEFAULT_POINTS - 1
    if not 1 <= steps <= _MOST_SIGMAS:
        raise UsageError(
            f"{text!r} is not a range of 2 to {count_text(_MOST_SIGMAS)} sigmas", hint="0:0.3, or 0:0.3:0.05"
        )
    step = (high - low) / steps
    return [round(low + number * step, 9) for number in range(int(steps + 1e-9) + 1)]


_Program = Annotated[
    str | Path,
    Option("StableHLO program to run.", metavar="PROGRAM", is_argument=True, label="an input"),
]


def _noise_on(values: str) -> Option:
    return Option(
        f"Add Gaussian noise to {values}: a value, a list A,B, or a range LOW:HIGH (7 values) or "
        "LOW:HIGH:STEP, in units.",
        metavar="SIGMAS",
        parse=_sigmas_of,
        is_text=True,
        default_text="",
    )


_SigmaMac = Annotated[float | Sequence[float], _noise_on("the results of contractions")]
_SigmaWeight = Annotated[float | Sequence[float], _noise_on("weights")]
_SigmaActivation = Annotated[float | Sequence[float], _noise_on("activations")]
_Data = Annotated[
    str | Path | None,
    Option(
        "Read inputs and labels from FILE: arrays `inputs`, `labels`, and `argN` for other arguments "
        "(default: random inputs, without accuracy).",
        metavar="FILE.npz",
        panel=INPUT,
        label="the data",
    ),
]
_Unit = Annotated[
    Literal["lsb", "std"],
    Option("Set the unit of sigma: a step of the quantiser, or the standard deviation of the values."),
]
_Bits = Annotated[
    int,
    AtLeast(1),
    AtMost(24),
    Option("Set the bits of values that the program does not quantise.", metavar="N"),
]
_Seeds = Annotated[PositiveInt, AtMost(10_000), Option("Run each point with N seeds.", metavar="N")]
_Confidence = Annotated[
    float, AtLeast(0.5), AtMost(0.9999), Option("Set the level of the confidence intervals.", metavar="P")
]
_Drop = Annotated[
    float,
    AtLeast(0.0),
    AtMost(1.0),
    Option("Report the noise that lowers the accuracy by at most this share.", metavar="SHARE"),
]
_Timeout = Annotated[
    float, AtLeast(1.0), Option("Limit all runs in seconds.", flag="timeout", metavar="SECONDS")
]


@checked()
def noise(
    program: _Program,
    *,
    sigma_mac: _SigmaMac = (),
    sigma_weight: _SigmaWeight = (),
    sigma_activation: _SigmaActivation = (),
    data: _Data = None,
    unit: _Unit = "lsb",
    bits: _Bits = 8,
    seeds: _Seeds = 8,
    seed: Seed = 0,
    confidence: _Confidence = 0.95,
    drop: _Drop = 0.01,
    dims: Dims = {},  # noqa: B006 # read only
    timeout_s: _Timeout = 3600.0,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> NoiseReport:
    """Run a StableHLO program with Gaussian noise at its contractions, and return accuracy and SNR over the
    noise.

    A kind of noise with several sigmas is a curve, and one with a single sigma is added to the other curves.
    Noise on results and activations differs in each run; noise on weights is drawn once per seed. XLA runs
    the program on the CPU, in a child process. Raises ``FormatError`` for a file that cannot be read,
    ``UsageError`` without noise or if the data do not fit the program, and ``UnsupportedError`` if the
    program has no contraction or does not run.

    Examples:
        >>> hespas.noise("samples/mlp_train.mlir", sigma_mac=[0.0, 0.5], seeds=2).kinds
        ('mac',)
    """
    refuse_in_untrusted("running a program")
    sigmas: dict[NoiseKind, Sequence[float]] = {
        kind: [float(given)] if isinstance(given, int | float) else [float(sigma) for sigma in given]
        for kind, given in zip(KINDS, (sigma_mac, sigma_weight, sigma_activation), strict=True)
    }
    for kind, values in sigmas.items():
        if wrong := [sigma for sigma in values if not 0 <= sigma < inf]:
            raise UsageError(
                f"`sigma_{kind}` has the value {wrong[0]:g}", hint="pass standard deviations of 0 or more"
            )
    if not any(sigma > 0 for values in sigmas.values() for sigma in values):
        raise UsageError("no noise was given", hint="pass `sigma_mac=[0.0, 0.1, 0.2]`, or another sigma")
    sink = Diagnostics() if diagnostics is None else diagnostics
    curves = run_with_noise(
        read_bytes(Path(program), limits().input_bytes),
        str(program),
        None if data is None else Path(data),
        NoiseSettings(
            sigmas=sigmas,
            dims=dims,
            unit=unit,
            bits=bits,
            seeds=seeds,
            first_seed=seed,
            confidence=confidence,
            timeout_s=timeout_s,
        ),
        progress,
    )
    if curves.nested:
        sink.warning(
            "noise.nested",
            "",
            f"{counted(curves.nested, 'contraction')} in branches or other loops got no noise",
            path=str(program),
        )
    if curves.is_random:
        sink.warning(
            "noise.random-inputs", "", "the inputs are random: pass `data` for accuracy", path=str(program)
        )
    return NoiseReport(
        program=str(program),
        data="" if data is None else str(data),
        unit=unit,
        seeds=seeds,
        confidence=confidence,
        drop=drop,
        curves=curves,
        diagnostics=sink,
    )
