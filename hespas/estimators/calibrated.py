"""Calibrated roofline: formulas of time that were fitted to measurements of a device.

Each class of operations (a kind, an operation, a number format and a kernel variant) has its own fits. A
prediction has an interval that held 90 % of the measurements of shapes outside the fit. The interval is wider
for operations larger or smaller than the fitted sizes. TPUs without fits use the fits of the measured TPU,
with a much wider interval.
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
from hespas.graph import BEYOND_RANGE, MEASURED_BASIS, Diagnostics, Estimate, OpGraph, reference_basis
from hespas.graph.columns import FloatArray
from hespas.hardware import ANY, Device, Fit, FitParameter, load_device
from hespas.hardware.kernel_shares import common_fits, fits_distance, recorded_references
from hespas.hardware.library import fits_of_user
from hespas.operations import MATRIX_KINDS, LabelColumn, Labels, Operations, build, timed_with_events

__all__ = ["Calibrated", "FitIndex", "doublings_beyond"]

_AS_FITTED = 0.5
"""Limit of doublings beyond the fitted sizes that count as within them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Estimator that predicts times with the fitted formulas of a device.

    ``chip_wide``: use the device's overall fit for kinds of operations that have no fit. ``num_ranks``:
    number of ranks in collectives over all ranks, for graphs that do not state it (-1: unknown).
    """

    chip_wide: bool = True
    num_ranks: int = -1

    inert_options: ClassVar[frozenset[str]] = frozenset()

    @property
    def name(self) -> str:
        """Name of the model in the registry and in reports."""
        return "calibrated"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Return the time of one execution of each node on ``device``; see :class:`Estimator`."""
        return estimate_by_operation(self, graph, device, diagnostics, num_ranks=self.num_ranks)

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Return the time of one execution of each operation; NaN without a fit for it. O(ops)."""
        findings = Diagnostics() if diagnostics is None else diagnostics
        index = FitIndex.of(device)
        columns, basis = np.full((3, len(ops)), np.nan), LabelColumn(len(ops))
        for labels, rows in ops.classes():
            kind, op, scheme, variant = labels
            selection = index.select(kind, op, scheme, variant) or self._carried_over(device, labels)
            location = f"{device.name} {' '.join(label for label in labels if label)}"
            if selection is None or (not self.chip_wide and selection.assumed[0] == "calibrated.chip-wide"):
                findings.warning(
                    "calibrated.not-covered", location, "no fit covers the operations", count=len(rows)
                )
                continue
            code, text = selection.assumed
            if code:
                findings.info(code, location, text, count=len(rows))
            columns[:, rows], evidence = _times_of_selection(
                selection, ops.take(rows), index, (location, findings)
            )
            basis.fill(rows, evidence)
        columns[1:, np.isnan(columns[0])] = np.nan
        return Prediction.of(self.name, *within_roof(columns, ops, device), basis=basis.labels())

    def _carried_over(self, device: Device, labels: tuple[str, str, str, str]) -> _FitSelection | None:
        """Return the fits of TPU-v4 for a class of operations, to be applied with the data-sheet rates of
        ``device``; None if ``device`` is not another TPU, or without such fits.
        """
        if device.kind != "tpu" or device.name == _MEASURED_TPU:
            return None
        selection = replace(FitIndex.of(load_device(_MEASURED_TPU)), device=device).select(*labels)
        if selection is None or (not self.chip_wide and selection.assumed[0] == "calibrated.chip-wide"):
            return None
        text = f"no measurements of it: fits of {_MEASURED_TPU} are used, with intervals of a factor of three"
        return replace(selection, assumed=(_CARRIED, text), references=(_MEASURED_TPU,))


_MEASURED_TPU = "TPU-v4"
"""The TPU whose fits are used for TPUs without fits."""
_CARRIED = "calibrated.carried"
_NEW_DEVICE_WIDENING = 1.0
"""Interval of a device without measurements [log time], as learned models assume."""
_SIMILAR_KINDS = CHIP_WIDE_KINDS - MATRIX_KINDS
"""Kinds whose operations stream their data, so that a fit of one is closer to another than the chip's fit."""
_OF_SEVERAL_PASSES = frozenset({"normalization", "pooling"})
"""Kinds whose operations differ in passes over the memory and over windows: a common fit of some operations
does not determine the time of others.
"""
_STAND_IN_WIDENING = 1.0
"""Widening of both ends of the interval [log time] for each difference between an operation and the measured
one whose fit it uses: another operation of the kind, another rank or library.
"""


_STEPS = ("compute_scale", "scale_matrix")
"""Quantising kernels of a scale per tensor, which scheme ``fp8`` runs before the product."""
_STEP_SCHEME = "bf16"
_WIDEST = 4.0


def _without_quantizing(
    fit: Fit, ops: Operations, index: FitIndex, report: tuple[str, Diagnostics]
) -> FloatArray:
    """Return the time and its 5 % and 95 % bounds [ns] of matmuls that need no quantising kernels, from a fit
    that includes these kernels.

    Serving libraries take 16-bit activations, compute a scale, convert the activations and multiply. The
    measured tables have the sum of the times of these kernels. The fitted times of computing the scale and of
    converting are subtracted.
    """
    location, findings = report
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    whole = build.matmuls(Labels.constant(fit.scheme, len(ops)), batch=batch, m=m, n=n, k=k)
    times = _time_and_interval(fit, whole, index.device, fit.scheme)
    quantizing_ns = _quantizing_ns(fit, ops, index)
    if quantizing_ns is None:
        message = f"the fit of {fit.scheme} includes the kernels that quantise the activations"
        findings.warning("calibrated.includes-quantizing", location, message, count=len(ops))
        return times
    message = f"the fit of {fit.scheme}, less the fitted kernels that quantise the activations"
    findings.info("calibrated.less-quantizing", location, message, count=len(ops))
    plain = index.by_class.get(("matmul", "", _STEP_SCHEME)) or index.by_class.get((ANY, ANY, ANY), ())
    start_ns = min((other.value("t0_ns") for other in plain), default=np.inf)
    single_kernel = replace(fit, parameters=_with_start_limit(fit, start_ns))
    floor = _time_and_interval(single_kernel, whole, index.device, fit.scheme)[0]
    time = np.minimum(np.maximum(times[0] - quantizing_ns, floor), times[0])
    # The same absolute uncertainty is a larger share of a shorter time.
    widening = np.minimum(times[0] / time, _WIDEST)
    low, high = (time * (end / times[0]) ** widening for end in times[1:])
    return np.stack((time, low, high))


def _quantizing_ns(fit: Fit, ops: Operations, index: FitIndex) -> FloatArray | None:
    """Return the time [ns] of the kernels that quantise the activations; None if the device has no fit of
    them for this number format.
    """
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


_SAME_FORMAT: Sequence[frozenset[str]] = (
    frozenset({"bf16", "f16"}),
    frozenset({"f8E4M3FN", "f8E4M3FNUZ", "f8E5M2", "f8E5M2FNUZ", "a8w8_fp8"}),
    frozenset({"i8", "a8w8"}),
    frozenset({"f32", "f32_full"}),
)
"""Formats of the same width and speed on a device whose rates for them are equal."""

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
"""Kinds for which a device's own table comes before the common kernels of its vendor's devices, with the
number of operations that the table must have more than: streaming kernels show the share of the memory
bandwidth that a device reaches; rotations and gated activations alone do not. Normalisations in tables and in
programs differ more from each other than devices do (`benchmarks.single_gpu`: no better on devval, worse on
the MI100).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FitSelection:
    """Fits for a class of operations in order of preference. Each operation uses the first fit that was
    fitted on a range of sizes with the size of the operation.

    ``scheme`` is the number format of the fits. ``quantizing`` is True if the fits include kernels that
    quantise the activations and the operations do not need these kernels. ``assumed`` is the code and the
    text of a diagnostic, for fits of another class of operations (empty: same class). ``references`` are the
    devices that were measured for the fits (empty: the estimated device). ``differences`` is the number of
    labels in which a stand-in differs from the operation.
    """

    fits: tuple[Fit, ...]
    scheme: str
    quantizing: bool = False
    assumed: tuple[str, str] = ("", "")
    references: tuple[str, ...] = ()
    differences: int = 0


def _times_of_selection(
    selection: _FitSelection, ops: Operations, index: FitIndex, report: tuple[str, Diagnostics]
) -> tuple[FloatArray, Labels]:
    """Return the time and interval of operations that use the same fits, shape ``(3, ops)``, and the basis of
    each time. ``report`` is a pair: the location for messages, and the collector of diagnostics.
    """
    beyond = np.stack([doublings_beyond(fit, ops) for fit in selection.fits])
    # The first fit whose sizes cover an operation; the preferred one if none does.
    chosen = np.argmax(beyond <= _AS_FITTED, axis=0)
    times = np.full((3, len(ops)), np.nan)
    location, findings = report
    numbers: list[int] = np.unique(chosen).tolist()
    for number in numbers:
        rows = np.flatnonzero(chosen == number)
        part, fit = ops.take(rows), selection.fits[number]
        if selection.quantizing:
            times[:, rows] = _without_quantizing(fit, part, index, report)
        else:
            times[:, rows] = _time_and_interval(fit, part, index.device, selection.scheme)
        if selection.differences:
            wider = np.exp(selection.differences * _STAND_IN_WIDENING)
            times[1:, rows] *= np.array([[1 / wider], [wider]])
        if selection.assumed[0] == _CARRIED:  # the interval must contain the time of the data sheet
            peaks = peak_times(part, index.device)
            sheet = index.device.launch_overhead_ns + np.fmax(peaks.arithmetic_ns, peaks.memory_ns)
            time, low, high = times[:, rows]
            low = reduce(np.fmin, (low, time * np.exp(-_NEW_DEVICE_WIDENING), sheet))
            high = np.fmax(high, time * np.exp(_NEW_DEVICE_WIDENING))
            times[:, rows] = np.stack((time, np.fmin(low, time), high))
        if index.is_timed_with_events(fit) and not part.variant[0]:
            with np.errstate(invalid="ignore"):
                launches = int((times[0, rows] < 2 * fit.value("t0_ns")).sum())
            text = "fitted on times from events: more than half of the time is the launch by the host"
            findings.warning("calibrated.event-times", location, text, count=launches)
    outside = beyond.min(axis=0) > _AS_FITTED
    findings.info(
        "calibrated.outside-support", location, "sizes beyond the fitted ones", count=int(outside.sum())
    )
    references, device = selection.references, index.device
    if device.fits_of not in ("", device.name) and selection.fits[0] not in device.own_fits:
        references = references or (device.fits_of,)
    if references:
        basis = Labels.constant(reference_basis(references), len(ops))
    else:
        basis = Labels.choice((MEASURED_BASIS, BEYOND_RANGE), outside.astype(np.int64))
    unknown = "a size or a rate is unknown, or the fit is of another version"
    findings.warning("calibrated.unknown-size", location, unknown, count=int(np.isnan(times[0]).sum()))
    return times, basis


@dataclass(frozen=True, slots=True)
class FitIndex:
    """Fits of a device, indexed by kind, operation and number format."""

    device: Device
    by_class: Mapping[tuple[str, str, str], tuple[Fit, ...]] = field(repr=False)
    schemes: Mapping[str, tuple[str, ...]] = field(repr=False)
    """Kind -> schemes with fits, the one with most samples first."""
    common: Mapping[tuple[str, str], Fit] = field(repr=False, default_factory=dict[tuple[str, str], Fit])
    """Kernels that the vendor's devices have in common, for kinds without a fit of the user."""

    @classmethod
    def of(cls, device: Device) -> FitIndex:
        """Return the index of a device's fits."""
        by_class: dict[tuple[str, str, str], list[Fit]] = {}
        samples: dict[str, dict[str, int]] = {}
        for fit in device.fits:
            if fit.form == PRODUCTS:  # adjusts predictions, does not predict operations
                continue
            by_class.setdefault((fit.kind, fit.op, fit.scheme), []).append(fit)
            counts = samples.setdefault(fit.kind, {})
            counts[fit.scheme] = counts.get(fit.scheme, 0) + fit.samples
        ordered = {  # the default variant first, then the one with most samples
            key: tuple(sorted(fits, key=lambda fit: (not fit.default, -fit.samples, fit.variant)))
            for key, fits in by_class.items()
        }
        schemes = {
            kind: tuple(sorted(counts, key=lambda name: -counts[name])) for kind, counts in samples.items()
        }
        kinds = {fit.kind for fit in fits_of_user(device)}
        common = {
            (fit.kind, fit.op): fit
            for fit in common_fits(device)
            if fit.kind not in kinds and fit.form != PRODUCTS
        }
        return cls(device, ordered, schemes, common)

    def select(self, kind: str, op: str, scheme: str, variant: str) -> _FitSelection | None:
        """Return the fits for a class of operations, or None if none covers it.

        An operation without a variant is assumed to run the kernel of a framework. It uses, in this order:
        the fit of a kernel that all devices of the vendor have in common, a fit of kernels recorded in
        programs on this device, and a fit of a measured table in the requested number format. For each, fits
        of the same operation are tried before fits of its kind. The last choices are fits that include
        quantising kernels, and then the fit of the whole chip.
        """
        names = (op, ANY) if op != ANY else (ANY,)
        if not variant and scheme and (selection := self._common_kernel(kind, names, scheme)):
            return selection
        for name in names:
            recorded = () if variant or not scheme else self.by_class.get((kind, name, ANY), ())
            if recorded and recorded[0].form == KERNELS.name:
                return _FitSelection(fits=recorded, scheme=scheme)
            if selection := self._of_format(kind, name, scheme, variant):
                is_other = kind in _OF_SEVERAL_PASSES and name == ANY and op not in ("", ANY)
                return replace(selection, differences=int(is_other))
            if recorded:
                return _FitSelection(fits=recorded, scheme=scheme)
        quantizing = _QUANTIZED_BY.get(scheme, "") if kind == "matmul" else ""
        for name in (op, ANY) if quantizing else ():
            if fits := self._fits(kind, name, quantizing, variant):
                return _FitSelection(fits=fits, scheme=quantizing, quantizing=True)
        return self.stand_in(kind, names, scheme, variant)

    def _common_kernel(self, kind: str, names: Sequence[str], scheme: str) -> _FitSelection | None:
        """Return the fit for an operation whose kernel all devices of the vendor have in common. A measured
        fit of this device comes before the common fit. Return None if the operation has no common kernel.
        """
        distance = fits_distance(self.device)
        for name in names if distance else ():
            if own := self._own_kernel(kind, name, scheme):
                return own
        for name in names:
            if common := self.common.get((kind, name)):
                assumed = ("calibrated.unseen-device", distance) if distance else ("", "")
                references = recorded_references(self.device)
                return _FitSelection(fits=(common,), scheme=scheme, assumed=assumed, references=references)
        return None

    def _own_kernel(self, kind: str, op: str, scheme: str) -> _FitSelection | None:
        """Return the device's measured fits of an operation for which the vendor has a common kernel; None if
        it has none.

        Fits of times from device events include the launch by the host. Therefore their start is limited to
        the start of the common fit.
        """
        common = self.common.get((kind, op)) or self.common.get((kind, ANY))
        if common is None or kind not in _OWN_FIRST:
            return None
        same = next((group for group in _SAME_FORMAT if scheme in group), frozenset({scheme}))
        for name in (scheme, *sorted(same - {scheme})):
            if op == ANY and sum(key[::2] == (kind, name) for key in self.by_class) <= _OWN_FIRST[kind]:
                continue
            if fits := self._fits(kind, op, name, ""):
                start_ns = common.value("t0_ns")
                kernels = tuple(
                    replace(fit, variant="", parameters=_with_start_limit(fit, start_ns))
                    if timed_with_events(fit.variant)
                    else fit
                    for fit in fits
                )
                return _FitSelection(fits=kernels, scheme=name)
        return None

    def is_timed_with_events(self, fit: Fit) -> bool:
        """Return True if the measured times behind a fit include launches by the host. For the whole chip's
        fit, return True if the fits of all its kernels do.
        """
        if fit.variant != ANY:
            return timed_with_events(fit.variant)
        kernels = [other for other in self.device.fits if other.variant != ANY and other.kind != "collective"]
        return bool(kernels) and all(timed_with_events(other.variant) for other in kernels)

    def _of_format(self, kind: str, op: str, scheme: str, variant: str) -> _FitSelection | None:
        """Return the fits of an operation in the requested number format, or in a format that takes the same
        time.
        """
        if fits := self._fits(kind, op, scheme, variant):
            return _FitSelection(fits=fits, scheme=scheme)
        for other in self._similar_schemes(kind, scheme):
            if fits := self._fits(kind, op, other, variant):
                text = f"no fit for {scheme or 'an unknown format'}: the fit of {other} is used"
                return _FitSelection(fits=fits, scheme=other, assumed=("calibrated.other-scheme", text))
        return None

    def stand_in(self, kind: str, names: Sequence[str], scheme: str, variant: str) -> _FitSelection | None:
        """Return the fits of the nearest measured operation: in kinds that stream their data, the same
        operation or kind in another variant, else another operation. The last choice is the fit of the whole
        chip.
        """
        others = sorted({key[1] for key in self.by_class if key[::2] == (kind, scheme)} - set(names))
        for name in (*names, *others) if kind in _SIMILAR_KINDS and scheme else ():
            fits = self.by_class.get((kind, name, scheme), ())
            if fits and fits[0].form != KERNELS.name:
                same = tuple(fit for fit in fits if fit.variant == variant)
                is_other = name != names[0] and (name != ANY or kind in _OF_SEVERAL_PASSES)
                text = f"no fit for {' '.join((names[0], variant)).strip()}: the fit of {name} is used"
                return _FitSelection(
                    fits=same or fits,
                    scheme=scheme,
                    assumed=("calibrated.stand-in", text),
                    differences=int(bool(variant) and not same) + int(is_other),
                )
        # The fit of the whole chip is only for kinds that run as a single kernel.
        fits = self.by_class.get((ANY, ANY, ANY), ())
        if kind not in CHIP_WIDE_KINDS or not fits or not scheme:
            return None
        if kind not in MATRIX_KINDS and not any(name not in {ANY, *MATRIX_KINDS} for name in self.schemes):
            return None  # fitted on products alone, which have another start and other traffic
        text = f"no fit of {kind} in {scheme}: the fit of the whole chip is used"
        return _FitSelection(fits=fits, scheme=scheme, assumed=("calibrated.chip-wide", text))

    def _fits(self, kind: str, op: str, scheme: str, variant: str) -> tuple[Fit, ...]:
        """Return the fits of a class in order of preference."""
        fits = self.by_class.get((kind, op, scheme), ())
        return tuple(fit for fit in fits if fit.variant == variant) if variant else fits

    def _similar_schemes(self, kind: str, scheme: str) -> Iterable[str]:
        """Yield other number formats whose fits may be used for ``scheme``: formats of the same width, with
        the same rate for kinds that use matrix units. Kinds that do not use matrix units may use any
        fitted format.
        """
        rate = rate_flops_per_s(self.device, scheme, matrix=kind in MATRIX_KINDS)
        same = [name for group in _SAME_FORMAT if scheme in group for name in sorted(group) if name != scheme]
        yield from (
            name
            for name in same
            if kind not in MATRIX_KINDS or rate_flops_per_s(self.device, name, matrix=True) == rate
        )
        if kind not in MATRIX_KINDS and scheme:
            yield from (name for name in self.schemes.get(kind, ()) if name not in (scheme, ANY, *same))


def _with_start_limit(fit: Fit, start_ns: float) -> tuple[FitParameter, ...]:
    """Return the parameters of a fit with its start (the fixed time per call) limited to ``start_ns``."""
    return tuple(
        FitParameter(name=parameter.name, value=min(parameter.value, start_ns))
        if parameter.name == "t0_ns"
        else parameter
        for parameter in fit.parameters
    )


_PER_DOUBLING = 0.25
"""Share by which an interval's half width grows with each doubling of a size beyond the fitted ones."""


def doublings_beyond(fit: Fit, ops: Operations) -> FloatArray:
    """Return by how many doublings the sizes of each operation are outside the fitted range, summed over all
    dimensions.
    """
    total = np.zeros(len(ops))
    for fitted in fit.support:
        size = ops.dim(fitted.name)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            over = np.log2(size / max(fitted.high, 1e-9))
            under = np.log2(max(fitted.low, 1e-9) / size)
        total += np.nan_to_num(np.maximum(np.maximum(over, under), 0.0), nan=0.0, posinf=64.0)
    if fit.form == PREFILL.name:  # fitted on whole prompts, with as many keys as queries
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            apart = np.abs(np.log2(ops.dim("kv_len") / ops.dim("q_len")))
        total += np.nan_to_num(apart, nan=0.0, posinf=64.0)
    return total


def _time_and_interval(fit: Fit, ops: Operations, device: Device, scheme: str) -> FloatArray:
    """Return the time and its 5 % and 95 % bounds [ns] that one fit predicts for operations of one number
    format. Shape (3, ops).
    """
    form = EVERY_FORM.get(fit.form)
    if form is None:
        return np.full((3, len(ops)), np.nan)
    values = {entry.name: entry.absent for entry in form.parameters if not isnan(entry.absent)}
    values |= {entry.name: entry.value for entry in fit.parameters}
    if any(entry.name not in values for entry in form.parameters):
        return np.full((3, len(ops)), np.nan)
    time = form_time_ns(form, values, ops, machine_of(device, ops.kind[0], scheme))
    return with_bands(fit, time, 1 + _PER_DOUBLING * doublings_beyond(fit, ops))
