"""Names that a shell completes: of devices, systems, estimators, formats and models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "COMPLETIONS",
    "device_names",
    "estimator_names",
    "format_names",
    "model_names",
    "system_names",
]


def _completions(incomplete: str, names: Iterable[str]) -> Sequence[str]:
    prefix = incomplete.casefold()
    return [name for name in names if name.casefold().startswith(prefix)]


def device_names(incomplete: str) -> Sequence[str]:
    """Complete the names of devices for a shell, which completes paths itself."""
    from hespas import hardware

    return _completions(incomplete, hardware.all_device_names())


def system_names(incomplete: str) -> Sequence[str]:
    """Complete the names of systems for a shell."""
    from hespas import hardware

    return _completions(incomplete, hardware.all_system_names())


def estimator_names(incomplete: str) -> Sequence[str]:
    """Complete the names of estimators for a shell, built-in ones first."""
    from hespas import estimators

    return _completions(incomplete, estimators.estimator_names())


def format_names(incomplete: str) -> Sequence[str]:
    """Complete the names of formats for a shell."""
    from hespas import converters

    return _completions(incomplete, converters.format_names())


def model_names(incomplete: str) -> Sequence[str]:
    """Complete the names of built-in language models for a shell."""
    from hespas.generators import llm

    return _completions(incomplete, llm.model_names())


COMPLETIONS: Mapping[str, Callable[[str], Sequence[str]]] = {
    "devices": device_names,
    "systems": system_names,
    "estimators": estimator_names,
    "formats": format_names,
    "models": model_names,
}
"""Names that a shell completes -> the function that lists them."""
