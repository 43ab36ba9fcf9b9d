"""The calibrated roofline: fitted forms of a device, chosen class by class.

A prediction has an interval that held 90 % of the measurements of shapes outside the fit; it widens where an
operation is larger or smaller than what was fitted on. TPUs without fits take those of the one that was
measured, with an interval as of any device that nobody measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import isnan
from typing import ClassVar

import numpy as np

from hespas.estimators.forms import CHIP_WIDE_KINDS, PREFILL, form_time_ns, machine_of
from hespas.estimators.interface import Prediction, estimate_by_operation, with_bands
from hespas.estimators.kernels import EVERY_FORM, KERNELS, PRODUCTS
from hespas.estimators.rates import peak_times, rate_flops_per_s, within_roof
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.columns import FloatArray
from hespas.hardware import ANY, Device, Fit, FitParameter, load_device
from hespas.hardware.kernel_shares import common_fits, fits_distance
from hespas.hardware.library import fits_of_user
from hespas.operations import MATRIX_KINDS, Labels, Operations, build, timed_with_events

__all__ = ["Calibrated", "FitIndex", "doublings_beyond"]

_AS_FITTED = 0.5
"""Doublings beyond the fitted sizes that count as within."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The estimator. ``chip_wide``: let a device's overall fit cover kinds that have none of their own.
    ``num_ranks``: size of collectives over all ranks where the graph does not say (-1: unknown).
    """

    chip_wide: bool = True
    num_ranks: int = -1

    inert_options: ClassVar[frozenset[str]] = frozenset()

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        return "calibrated"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each node on ``device``; see :class:`Estimator`."""
        return estimate_by_operation(self, graph, device, diagnostics, num_ranks=self.num_ranks)

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """The time of one execution of each operation; NaN where no fit covers it. O(ops)."""
        found = Diagnostics() if diagnostics is None else diagnostics
        index = FitIndex.of(device)
        columns = np.full((3, len(ops)), np.nan)
        for labels, rows in ops.classes():
            kind, op, scheme, variant = labels
            choice = index.choose(kind, op, scheme, variant) or self._carried_over(device, labels)
            where = f"{device.name} {' '.join(label for label in labels if label)}"
            if choice is None or (not self.chip_wide and choice.assumed[0] == "calibrated.chip-wide"):
                found.warning("calibrated.not-covered", where, "no fit covers it", count=len(rows))
                continue
            code, text = choice.assumed
            if code:
                found.info(code, where, text, count=len(rows))
            columns[:, rows] = _said_by_choice(choice, ops.take(rows), index, (where, found))
        columns[1:, np.isnan(columns[0])] = np.nan
        return Prediction.of(self.name, *within_roof(columns, ops, device))

    def _carried_over(self, device: Device, labels: tuple[str, str, str, str]) -> _Choice | None:
        """The measured TPU's fits of a class, as shares of another TPU's data sheet."""
        if device.kind != "tpu" or device.name == _MEASURED_TPU:
            return None
        found = replace(FitIndex.of(load_device(_MEASURED_TPU)), device=device).choose(*labels)
        if found is None or (not self.chip_wide and found.assumed[0] == "calibrated.chip-wide"):
            return None
        text = (
            f"nothing was measured on it: shares of {_MEASURED_TPU} stand in, intervals of a factor of three"
        )
        return replace(found, assumed=(_CARRIED, text))


_MEASURED_TPU = "TPU-v4"
"""The TPU whose fits others take that have none of their own."""
_CARRIED = "calibrated.carried"
_OF_ANOTHER = 1.0
"""The interval of a device that nobody measured [log time]: what learned models assume of one, too."""


def _as_of_another(said: FloatArray, ops: Operations, device: Device) -> FloatArray:
    """Intervals of another device's shares: they hold what this one's data sheet promises, too."""
    peaks = peak_times(ops, device)
    sheet = device.launch_overhead_ns + np.fmax(peaks.arithmetic_ns, peaks.memory_ns)
    time, low, high = said
    low = reduce(np.fmin, (low, time * np.exp(-_OF_ANOTHER), sheet))
    return np.stack((time, np.fmin(low, time), np.fmax(high, time * np.exp(_OF_ANOTHER))))


def _said_by_choice(
    choice: _Choice, ops: Operations, index: FitIndex, tell: tuple[str, Diagnostics]
) -> FloatArray:
    """Time and interval of each operation of one class, shape (3, ops)."""
    beyond = np.stack([doublings_beyond(fit, ops) for fit in choice.fits])
    # The first fit whose sizes cover an operation; the preferred one where none does.
    chosen = np.argmax(beyond <= _AS_FITTED, axis=0)
    said = np.full((3, len(ops)), np.nan)
    where, found = tell
    numbers: list[int] = np.unique(chosen).tolist()
    for number in numbers:
        rows = np.flatnonzero(chosen == number)
        part = ops.take(rows)
        if choice.quantizing:
            said[:, rows] = _without_quantizing(choice.fits[number], part, index, tell)
        else:
            said[:, rows] = _time_and_interval(choice.fits[number], part, index.device, choice.scheme)
        if choice.assumed[0] == _CARRIED:
            said[:, rows] = _as_of_another(said[:, rows], part, index.device)
        if index.is_timed_with_events(choice.fits[number]) and not part.variant[0]:
            _tell_of_events(choice.fits[number], said[0, rows], tell)
    outside = int((beyond.min(axis=0) > _AS_FITTED).sum())
    found.info("calibrated.outside-support", where, "sizes beyond those fitted on", count=outside)
    unknown = "a size or a rate is unknown, or the fit is of another version"
    found.warning("calibrated.unknown-size", where, unknown, count=int(np.isnan(said[0]).sum()))
    return said


def _tell_of_events(fit: Fit, time_ns: FloatArray, tell: tuple[str, Diagnostics]) -> None:
    """Say how many answers are mostly the launch that a host timed, where nobody asked for such times."""
    where, found = tell
    with np.errstate(invalid="ignore"):
        launches = int((time_ns < 2 * fit.value("t0_ns")).sum())
    text = "fitted on times taken with events: more than half of it is the launch by the host"
    found.warning("calibrated.event-times", where, text, count=launches)


# Products whose operands are quantised already, from fits of kernels that quantise them first.
#
# Serving libraries take 16-bit activations, find a scale, convert and multiply; the tables hold the sum. What
# finding the scale and converting take is fitted by itself and taken off again.

_STEPS = ("compute_scale", "scale_matrix")
"""The quantising kernels of a scale per tensor: what scheme ``fp8`` runs before the product."""
_STEP_SCHEME = "bf16"
_WIDEST = 4.0


def _without_quantizing(
    fit: Fit, ops: Operations, index: FitIndex, tell: tuple[str, Diagnostics]
) -> FloatArray:
    """Time, 5 % and 95 % [ns] of products of ``ops`` sizes without the quantising that ``fit`` holds."""
    where, found = tell
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    whole = build.matmuls(Labels.constant(fit.scheme, len(ops)), batch=batch, m=m, n=n, k=k)
    said = _time_and_interval(fit, whole, index.device, fit.scheme)
    taken = _quantizing_ns(fit, ops, index)
    if taken is None:
        message = f"the fit of {fit.scheme} holds the kernels that quantise the activations"
        found.warning("calibrated.includes-quantizing", where, message, count=len(ops))
        return said
    message = f"the fit of {fit.scheme}, less the fitted kernels that quantise the activations"
    found.info("calibrated.less-quantizing", where, message, count=len(ops))
    floor = _time_and_interval(_with_plain_start(fit, index), whole, index.device, fit.scheme)[0]
    time = np.minimum(np.maximum(said[0] - taken, floor), said[0])
    # The same absolute uncertainty of less time is more of it.
    widening = np.minimum(said[0] / time, _WIDEST)
    return np.stack((time, time * (said[1] / said[0]) ** widening, time * (said[2] / said[0]) ** widening))


def _quantizing_ns(fit: Fit, ops: Operations, index: FitIndex) -> FloatArray | None:
    """The time of the quantising kernels; None where they are not fitted for this scheme on this device."""
    if fit.scheme != "fp8":
        return None
    scheme = Labels.constant(_STEP_SCHEME, len(ops))
    total = np.zeros(len(ops))
    for step, passes in zip(_STEPS, (1.0, 1.5), strict=True):
        fits = index.by_class.get(("quantize", step, _STEP_SCHEME), ())
        if not fits:
            return None
        rows = ops.dim("batch") * ops.dim("m")
        quantize = build.elementwise(
            "quantize",
            scheme,
            op=Labels.constant(step, len(ops)),
            rows=rows,
            columns=ops.dim("k"),
            passes=np.full(len(ops), passes),
            flops_per_element=np.ones(len(ops)),
        )
        total += _time_and_interval(fits[0], quantize, index.device, _STEP_SCHEME)[0]
    return total


def _with_plain_start(fit: Fit, index: FitIndex) -> Fit:
    """The fit with the start of a single kernel, that of the device's 16-bit products."""
    plain = index.by_class.get(("matmul", "", _STEP_SCHEME)) or index.by_class.get((ANY, ANY, ANY), ())
    start = min((each.value("t0_ns") for each in plain), default=np.inf)
    parameters = tuple(
        FitParameter(name=each.name, value=min(each.value, start)) if each.name == "t0_ns" else each
        for each in fit.parameters
    )
    return replace(fit, parameters=parameters)


# Which fit covers a class of operations: its own, one of all operations of the kind, one of a scheme
# that runs alike, the whole chip's; and what had to be assumed.

_SAME_FORMAT: Sequence[frozenset[str]] = (
    frozenset({"bf16", "f16"}),
    frozenset({"f8E4M3FN", "f8E4M3FNUZ", "f8E5M2", "f8E5M2FNUZ", "a8w8_fp8"}),
    frozenset({"i8", "a8w8"}),
    frozenset({"f32", "f32_full"}),
)
"""Formats of the same width that run alike on a device whose rates for them are equal."""

_QUANTIZED_BY: Mapping[str, str] = {
    "f8E4M3FN": "fp8",
    "f8E4M3FNUZ": "fp8",
    "f8E5M2": "fp8",
    "f8E5M2FNUZ": "fp8",
    "a8w8_fp8": "fp8",
    "f4E2M1FN": "nvfp4",
    "i8": "sq",
    "a8w8": "sq",
}
"""Element type -> the scheme that quantises to it within the operation."""


_OWN_FIRST: Mapping[str, int] = {"vector": 5}
"""Kinds of which a device's own table comes before the kernels of its vendor's other devices, and how many
operations it has to hold to speak of others: what streams its data shows what share of the memory a device
reaches, rotations and gated activations alone do not. Normalisations of tables and of programs differ more
from each other than devices do (`benchmarks.single_gpu`: no better on devval, worse on the MI100).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Fits in order of preference: an operation takes the first that was fitted on sizes like its own.

    ``scheme`` is the one the fits speak of; ``quantizing`` is true where they hold kernels that quantise and
    the operation does not. ``assumed`` is a finding's code and text; empty where the fit is the class's own.
    """

    fits: tuple[Fit, ...]
    scheme: str
    quantizing: bool = False
    assumed: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class FitIndex:
    """The fits of a device by class."""

    device: Device
    by_class: Mapping[tuple[str, str, str], tuple[Fit, ...]] = field(repr=False)
    schemes: Mapping[str, tuple[str, ...]] = field(repr=False)
    """Kind -> schemes with fits, the most samples first."""
    common: Mapping[tuple[str, str], Fit] = field(repr=False, default_factory=dict[tuple[str, str], Fit])
    """Of kinds that no fit of the user speaks of: kernels that the vendor's devices have in common."""

    @classmethod
    def of(cls, device: Device) -> FitIndex:
        """The index of a device's fits."""
        by_class: dict[tuple[str, str, str], list[Fit]] = {}
        samples: dict[str, dict[str, int]] = {}
        for fit in device.fits:
            if fit.form == PRODUCTS:  # speaks of answers, not of operations
                continue
            by_class.setdefault((fit.kind, fit.op, fit.scheme), []).append(fit)
            counts = samples.setdefault(fit.kind, {})
            counts[fit.scheme] = counts.get(fit.scheme, 0) + fit.samples
        ordered = {key: tuple(sorted(fits, key=_preference)) for key, fits in by_class.items()}
        schemes = {kind: tuple(sorted(each, key=lambda name: -each[name])) for kind, each in samples.items()}
        kinds = {fit.kind for fit in fits_of_user(device)}
        common = {
            (fit.kind, fit.op): fit
            for fit in common_fits(device)
            if fit.kind not in kinds and fit.form != PRODUCTS
        }
        return cls(device, ordered, schemes, common)

    def choose(self, kind: str, op: str, scheme: str, variant: str) -> _Choice | None:
        """The fits for a class, None where none covers it: the operation's own before those of its kind, and
        of equal ones those of its format before those of any (which recordings make), unless these are of
        kernels as programs run them. What names no variant is taken for one of the kernels that were recorded
        on the device; else for a row of the device's own table, in its format; else for one of the kernels
        that the vendor's devices have in common, before any other fit.
        """
        names = (op, ANY) if op != ANY else (ANY,)
        if not variant and scheme:
            for name in names if self._distance()[1] else ():
                if own := self._own_kernel(kind, name, scheme):
                    return own
            for name in names:
                if common := self.common.get((kind, name)):
                    return _Choice(fits=(common,), scheme=scheme, assumed=self._distance())
        for name in names:
            recorded = () if variant or not scheme else self.by_class.get((kind, name, ANY), ())
            if recorded and recorded[0].form == KERNELS.name:
                return _Choice(fits=recorded, scheme=scheme)
            if found := self._of_format(kind, name, scheme, variant):
                return found
            if recorded:
                return _Choice(fits=recorded, scheme=scheme)
        return self._quantizing(kind, op, scheme, variant) or self._chip_wide(kind, scheme)

    def _own_kernel(self, kind: str, op: str, scheme: str) -> _Choice | None:
        """The device's own measured fits of a kernel that has a common one, too; of times that a host took
        with events, with the start that the common one has: a table says how a device's memory and units do,
        and its host only how long a launch took.
        """
        common = self.common.get((kind, op)) or self.common.get((kind, ANY))
        if common is None or kind not in _OWN_FIRST:
            return None
        same = next((group for group in _SAME_FORMAT if scheme in group), frozenset({scheme}))
        for each in (scheme, *sorted(same - {scheme})):
            if op == ANY and sum(key[::2] == (kind, each) for key in self.by_class) <= _OWN_FIRST[kind]:
                continue
            if fits := self._fits(kind, op, each, ""):
                found = tuple(_without_host(fit, common.value("t0_ns")) for fit in fits)
                return _Choice(fits=found, scheme=each)
        return None

    def _distance(self) -> tuple[str, str]:
        text = fits_distance(self.device)
        return ("calibrated.unseen-device", text) if text else ("", "")

    def is_timed_with_events(self, fit: Fit) -> bool:
        """Whether a fit holds launches by a host: the chip's does where those of all its kernels do."""
        if fit.variant != ANY:
            return timed_with_events(fit.variant)
        kernels = [each for each in self.device.fits if each.variant != ANY and each.kind != "collective"]
        return bool(kernels) and all(timed_with_events(each.variant) for each in kernels)

    def _of_format(self, kind: str, op: str, scheme: str, variant: str) -> _Choice | None:
        """Fits of an operation in its format, or in one that runs alike."""
        if found := self._fits(kind, op, scheme, variant):
            return _Choice(fits=found, scheme=scheme)
        for other in self._alike(kind, scheme):
            if found := self._fits(kind, op, other, variant):
                text = f"no fit for {scheme or 'an unknown format'}: that of {other} stands in"
                return _Choice(fits=found, scheme=other, assumed=("calibrated.other-scheme", text))
        return None

    def _quantizing(self, kind: str, op: str, scheme: str, variant: str) -> _Choice | None:
        quantizing = _QUANTIZED_BY.get(scheme, "") if kind == "matmul" else ""
        for name in (op, ANY) if quantizing else ():
            if found := self._fits(kind, name, quantizing, variant):
                return _Choice(fits=found, scheme=quantizing, quantizing=True)
        return None

    def _fits(self, kind: str, op: str, scheme: str, variant: str) -> tuple[Fit, ...]:
        """Fits of a class in order of preference."""
        fits = self.by_class.get((kind, op, scheme), ())
        return tuple(fit for fit in fits if fit.variant == variant) if variant else fits

    def _alike(self, kind: str, scheme: str) -> Iterable[str]:
        """Schemes whose fits may stand in: of the same width and rate; for what streams its data, any."""
        rate = rate_flops_per_s(self.device, scheme, matrix=kind in MATRIX_KINDS)
        same = [name for group in _SAME_FORMAT if scheme in group for name in sorted(group) if name != scheme]
        yield from (
            name
            for name in same
            if kind not in MATRIX_KINDS or rate_flops_per_s(self.device, name, matrix=True) == rate
        )
        if kind not in MATRIX_KINDS and scheme:
            yield from (name for name in self.schemes.get(kind, ()) if name not in (scheme, ANY, *same))

    def _chip_wide(self, kind: str, scheme: str) -> _Choice | None:
        fits = self.by_class.get((ANY, ANY, ANY), ())
        if kind not in CHIP_WIDE_KINDS or not fits or not scheme:
            return None
        if kind not in MATRIX_KINDS and not any(name not in {ANY, *MATRIX_KINDS} for name in self.schemes):
            return None  # fitted on products alone, whose start and traffic are not those of other kinds
        text = f"no fit of {kind} in {scheme}: the whole chip's stands in"
        return _Choice(fits=fits, scheme=scheme, assumed=("calibrated.chip-wide", text))


def _without_host(fit: Fit, start_ns: float) -> Fit:
    """A fit of times that a host took with events, with the start of a kernel in place of the launch."""
    if not timed_with_events(fit.variant):
        return fit
    parameters = tuple(
        FitParameter(name=each.name, value=min(each.value, start_ns)) if each.name == "t0_ns" else each
        for each in fit.parameters
    )
    return replace(fit, variant="", parameters=parameters)


def _preference(fit: Fit) -> tuple[bool, int, str]:
    """The default variant first, then the most samples."""
    return not fit.default, -fit.samples, fit.variant


# What one fit says of operations: its form's time, and the interval from its errors on unseen shapes.

_PER_DOUBLING = 0.25
"""Share by which an interval's half width grows with each doubling of a size beyond what was fitted on."""


def doublings_beyond(fit: Fit, ops: Operations) -> FloatArray:
    """Doublings by which sizes leave the range that was fitted on, all dimensions added up."""
    total = np.zeros(len(ops))
    for each in fit.support:
        size = ops.dim(each.name)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            over = np.log2(size / max(each.high, 1e-9))
            under = np.log2(max(each.low, 1e-9) / size)
        total += np.nan_to_num(np.maximum(np.maximum(over, under), 0.0), nan=0.0, posinf=64.0)
    if fit.form == PREFILL.name:  # whole prompts: as many keys as queries
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            apart = np.abs(np.log2(ops.dim("kv_len") / ops.dim("q_len")))
        total += np.nan_to_num(apart, nan=0.0, posinf=64.0)
    return total


def _time_and_interval(fit: Fit, ops: Operations, device: Device, scheme: str) -> FloatArray:
    """What one fit says of operations of one scheme, shape (3, ops): time, 5 % and 95 % [ns]."""
    form = EVERY_FORM.get(fit.form)
    values = {each.name: each.value for each in fit.parameters}
    later = () if form is None else (each for each in form.parameters if not isnan(each.absent))
    values = {each.name: each.absent for each in later} | values
    if form is None or any(each.name not in values for each in form.parameters):
        return np.full((3, len(ops)), np.nan)
    time = form_time_ns(form, values, ops, machine_of(device, ops.kind[0], scheme))
    return with_bands(fit, time, 1 + _PER_DOUBLING * doublings_beyond(fit, ops))
