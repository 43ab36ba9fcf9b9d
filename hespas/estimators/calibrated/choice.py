"""Which fit speaks for a class of operations: its own, one of all operations of the kind, one of a scheme
that runs alike, the whole chip's; and what had to be assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hespas.estimators.calibrated.forms import CHIP_WIDE_KINDS
from hespas.estimators.operations import MATRIX_KINDS, rate_flops_per_s, timed_with_events
from hespas.hardware import ANY, Device, Fit

__all__ = ["Choice", "FitIndex"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
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

    @classmethod
    def of(cls, device: Device) -> FitIndex:
        """The index of a device's fits."""
        by_class: dict[tuple[str, str, str], list[Fit]] = {}
        samples: dict[str, dict[str, int]] = {}
        for fit in device.fits:
            by_class.setdefault((fit.kind, fit.op, fit.scheme), []).append(fit)
            counts = samples.setdefault(fit.kind, {})
            counts[fit.scheme] = counts.get(fit.scheme, 0) + fit.samples
        ordered = {key: tuple(sorted(fits, key=_preference)) for key, fits in by_class.items()}
        schemes = {kind: tuple(sorted(each, key=lambda name: -each[name])) for kind, each in samples.items()}
        return cls(device, ordered, schemes)

    def choose(self, kind: str, op: str, scheme: str, variant: str) -> Choice | None:
        """The fits for a class, None where none covers it: the operation's own before those of its kind, and
        of equal ones those of its format before those of any (which recordings make).
        """
        names = (op, ANY) if op != ANY else (ANY,)
        for name in names:
            if found := self._of_format(kind, name, scheme, variant):
                return found
            recorded = () if variant else self.by_class.get((kind, name, ANY), ())
            if recorded and scheme:
                return Choice(fits=recorded, scheme=scheme)
        return self._quantizing(kind, op, scheme, variant) or self._chip_wide(kind, scheme)

    def is_timed_with_events(self, fit: Fit) -> bool:
        """Whether a fit holds launches by a host: the chip's does where those of all its kernels do."""
        if fit.variant != ANY:
            return timed_with_events(fit.variant)
        kernels = [each for each in self.device.fits if each.variant != ANY and each.kind != "collective"]
        return bool(kernels) and all(timed_with_events(each.variant) for each in kernels)

    def _of_format(self, kind: str, op: str, scheme: str, variant: str) -> Choice | None:
        """Fits of an operation in its format, or in one that runs alike."""
        if found := self._fits(kind, op, scheme, variant):
            return Choice(fits=found, scheme=scheme)
        for other in self._alike(kind, scheme):
            if found := self._fits(kind, op, other, variant):
                text = f"no fit for {scheme or 'an unknown format'}: that of {other} speaks for it"
                return Choice(fits=found, scheme=other, assumed=("calibrated.other-scheme", text))
        return None

    def _quantizing(self, kind: str, op: str, scheme: str, variant: str) -> Choice | None:
        quantizing = _QUANTIZED_BY.get(scheme, "") if kind == "matmul" else ""
        for name in (op, ANY) if quantizing else ():
            if found := self._fits(kind, name, quantizing, variant):
                return Choice(fits=found, scheme=quantizing, quantizing=True)
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

    def _chip_wide(self, kind: str, scheme: str) -> Choice | None:
        fits = self.by_class.get((ANY, ANY, ANY), ())
        if kind not in CHIP_WIDE_KINDS or not fits or not scheme:
            return None
        if kind not in MATRIX_KINDS and not any(name not in {ANY, *MATRIX_KINDS} for name in self.schemes):
            return None  # fitted on products alone, whose start and traffic are not those of other kinds
        text = f"no fit of {kind} in {scheme}: the whole chip's speaks for it"
        return Choice(fits=fits, scheme=scheme, assumed=("calibrated.chip-wide", text))


def _preference(fit: Fit) -> tuple[bool, int, str]:
    """The default variant first, then the most samples."""
    return not fit.default, -fit.samples, fit.variant
