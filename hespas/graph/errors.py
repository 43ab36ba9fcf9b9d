"""Every error this package raises on purpose, and the exit code of each class.

An error carries data (file, position, expectation, remedy); only ``hespas.cli`` renders it and exits.
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
"""A name taken from an input may have megabytes."""


def clipped(text: str) -> str:
    """A text short enough to show: its start, and ``...`` where more followed."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def short_repr(value: object, name: str, *details: str) -> str:
    """``<Workload llama.et: 8 ranks, 1 class, 4,312 ops>``: what a value is in a line of 200 characters."""
    shown = name if len(name) <= 60 else f"{name[:60]}..."
    text = f"{' '.join(filter(None, (type(value).__name__, shown)))}: {', '.join(details)}"[:198]
    return f"<{''.join(each if each.isprintable() else '?' for each in text)}>"


class HespasError(Exception):
    """Root of the class tree.

    ``path`` is the file at fault, ``position`` where in it (``line 3``, ``byte 1042``, ``node 17``),
    ``hint`` what the user can do about it. ``code`` is the rule that is broken (``ET001``), where there is
    one: ``message`` begins with it, ``text`` is the message without.
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
        """File, position, message and remedy; what is too long to read is cut."""
        position, message = clipped(self.position or ""), clipped(self.message)
        text = ": ".join(part for part in (self.path, position, message) if part)
        return f"{text}\n  try: {clipped(self.hint)}" if self.hint else text


class CheckFailedError(HespasError):
    """The thing checked is not valid, or is past a threshold."""


class UsageError(HespasError):
    """The request contradicts itself or names something that does not exist."""


class OutputError(UsageError):
    """The destination cannot be written: it exists already, its folder is missing, the disk is full."""


class FormatError(HespasError):
    """The input is unreadable or malformed."""


class BoundaryError(FormatError):
    """An input file names a program, or a path outside of its folder: neither is run or opened."""


class BudgetError(FormatError):
    """The input takes more processor time or memory, or has more ranks, than it may."""


class UnsupportedError(HespasError):
    """The input is understood, but this version cannot handle it."""


class MissingExtraError(UnsupportedError):
    """An optional dependency is needed and not installed."""

    def __init__(self, feature: str, extra: str, *, detail: str | None = None) -> None:
        why = f" ({detail})" if detail else ""
        super().__init__(
            f"{feature} needs the optional '{extra}' dependencies{why}",
            hint=f"pip install 'hespas[{extra}]'",
        )


class InvariantError(HespasError):
    """A promise between our own parts is broken: our bug, never the user's."""


# Most specific class first: `exit_code` takes the first that matches.
EXIT_CODES: dict[type[HespasError], int] = {
    CheckFailedError: 1,
    UsageError: 2,
    FormatError: 3,
    UnsupportedError: 4,
    InvariantError: 70,
}


def exit_code(error: BaseException) -> int:
    """The process exit code for an error: the table above, 70 for anything unforeseen."""
    for kind, code in EXIT_CODES.items():
        if isinstance(error, kind):
            return code
    return 70
