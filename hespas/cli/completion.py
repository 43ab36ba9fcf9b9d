"""What a shell offers behind an option: names of devices, estimators and formats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["devices", "estimators", "formats"]


def devices(incomplete: str) -> Sequence[str]:
    """The devices that ship with the package; a path is the shell's own business."""
    from hespas.hardware import device_names

    return _beginning(incomplete, device_names())


def estimators(incomplete: str) -> Sequence[str]:
    """The estimators, built-in first."""
    from hespas.estimators import estimator_names

    return _beginning(incomplete, estimator_names())


def formats(incomplete: str) -> Sequence[str]:
    """The formats."""
    from hespas.converters import format_names

    return _beginning(incomplete, format_names())


def _beginning(incomplete: str, names: Iterable[str]) -> Sequence[str]:
    wanted = incomplete.casefold()
    return [name for name in names if name.casefold().startswith(wanted)]
