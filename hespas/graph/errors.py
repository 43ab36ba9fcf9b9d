"""Errors that this package raises, and their exit codes.

An error carries data (file, position, expectation, remedy); only ``hespas.cli`` prints it and exits.
"""

from __future__ import annotations

__all__ = [
    "EXIT_CODES",
    "BoundaryError",
    "BudgetError",
    "CheckFailedError",
    "FormatError",
    "HespasError",
    "InvariantError",
    "MissingExtraError",
    "OutputError",
    "UnsupportedError",
    "UsageError",
    "clipped",
    "exit_code",
    "short_repr",
]


_MOST_CHARACTERS = 500
"""Limit of the characters shown of a text: a name in an input may have megabytes."""


def clipped(text: str) -> str:
    """Return the first 500 characters of a text, followed by ``...`` if it is longer."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def short_repr(value: object, name: str, *details: str) -> str:
    """Return the one-line representation of a value, such as ``<Workload llama.et: 8 ranks, 1 class, 4,312
    ops>``. It has at most 200 printable characters.
    """
    shown = name if len(name) <= 60 else f"{name[:60]}..."
    text = f"{' '.join(filter(None, (type(value).__name__, shown)))}: {', '.join(details)}"[:198]
    return f"<{''.join(character if character.isprintable() else '?' for character in text)}>"


class HespasError(Exception):
    """Base class of all errors of the package.

    ``path`` is the file at fault, ``position`` the position in it (``line 3``, ``byte 1042``, ``node 17``),
    ``hint`` a possible remedy. ``code`` is the violated rule (``ET001``) or empty; ``message`` begins with
    the code, ``text`` is the message without it.
    """

    def __init__(
        self,
        text: str,
        *,
        code: str = "",
        path: str | None = None,
        position: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.code, self.text = code, text
        self.message = f"{code}: {text}" if code else text
        super().__init__(self.message)
        self.path = path
        self.position = position
        self.hint = hint

    def __str__(self) -> str:
        """Return file, position, message and remedy, each clipped to 500 characters."""
        position, message = clipped(self.position or ""), clipped(self.message)
        text = ": ".join(part for part in (self.path, position, message) if part)
        return f"{text}\n  try: {clipped(self.hint)}" if self.hint else text


class CheckFailedError(HespasError):
    """A check failed: the input is not valid, or a value exceeds its threshold."""


class UsageError(HespasError):
    """A request contradicts itself or names something that does not exist."""


class OutputError(UsageError):
    """The destination cannot be written: it exists, its folder is missing, or the disk is full."""


class FormatError(HespasError):
    """The input cannot be read or is malformed."""


class BoundaryError(FormatError):
    """An input file names a program, or a path outside of its folder. Neither is run or opened."""


class BudgetError(FormatError):
    """The input exceeds a limit of CPU time, memory or ranks."""


class UnsupportedError(HespasError):
    """The input is valid, but this version does not support it."""


class MissingExtraError(UnsupportedError):
    """An optional dependency is required but not installed."""

    def __init__(self, feature: str, extra: str, *, detail: str | None = None) -> None:
        why = f" ({detail})" if detail else ""
        super().__init__(
            f"{feature} needs the optional '{extra}' dependencies{why}",
            hint=f"pip install 'hespas[{extra}]'",
        )


class InvariantError(HespasError):
    """An internal invariant is violated: a bug of this package, never a fault of the user."""


EXIT_CODES: dict[type[HespasError], int] = {
    CheckFailedError: 1,
    UsageError: 2,
    FormatError: 3,
    UnsupportedError: 4,
    InvariantError: 70,
}
"""Exit codes by class, most specific first: :func:`exit_code` uses the first match."""


def exit_code(error: BaseException) -> int:
    """Return the process exit code for an error: the code in :data:`EXIT_CODES`, or 70 for other errors."""
    for kind, code in EXIT_CODES.items():
        if isinstance(error, kind):
            return code
    return 70
