"""What a recorder keeps of one step of one rank: plain values, of which nothing needs PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["VALUE_GUESSED", "Argument", "Call", "Phase", "Recording", "Talk", "TensorRecord"]

VALUE_GUESSED = "value-guessed"
"""The finding about a value that was read from a tensor without data."""


class TensorRecord(NamedTuple):
    """A tensor that an operation takes or makes. ``dtype`` is PyTorch's name without ``torch.``; strides
    count elements. ``storage`` numbers the memory behind it in order of first use, over one recording.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int


Argument = TensorRecord | tuple[TensorRecord, ...] | str
"""One argument in the order of the schema: a tensor, a list of tensors, or anything else as its text (empty:
None), as PyTorch's profiler writes it.
"""


class Phase:
    """Names of the parts of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """Forward operations of a checkpoint, run again by the backward pass."""
    OPTIMIZER = "optimizer"


class Talk(NamedTuple):
    """The communication that a call starts. ``word`` is the library's name (``_allgather_base_``); ``group``
    names a row of :attr:`Recording.groups`; ``peer`` is a global rank, ``tag`` as given, both -1 where there
    is none. ``reduction`` is ``sum``, ``avg``, ... or empty. ``ragged``: parts of an exchange differ in size.
    """

    word: str
    group: str
    operand_bytes: float
    result_bytes: float
    peer: int = -1
    tag: int = -1
    reduction: str = ""
    ragged: bool = False


class Call(NamedTuple):
    """One dispatched operation. ``op`` is its name with namespace (``aten::mm``), ``overload`` its variant.

    ``reads`` and ``writes`` are storages; ``fresh`` are results in memory that the call made. ``is_view``:
    it makes no values. ``module`` is the path of the module (``GPT.blocks.0.attn``), ``source`` the line of
    the user's program (``train.py:31``).
    """

    op: str
    overload: str
    arguments: tuple[Argument, ...]
    results: tuple[TensorRecord, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fresh: tuple[int, ...] = ()
    is_view: bool = False
    module: str = ""
    phase: str = Phase.FORWARD
    source: str = ""
    talk: Talk | None = None


@dataclass(slots=True)
class Recording:
    """One step of one rank. ``groups`` holds the global ranks of each process group that talks, by name, in
    the order in which groups were made.

    ``state_bytes`` are storages that stand before the step and are used in it: parameters, optimizer state
    and inputs. ``peak_bytes`` is the most that was alive at once, state included; ``kept_bytes`` is what the
    step made and left alive. ``notes`` are findings of the recorder: code -> (message, count).
    """

    rank: int
    num_ranks: int
    calls: list[Call] = field(default_factory=list[Call])
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    state_bytes: int = 0
    peak_bytes: int = 0
    kept_bytes: int = 0
    notes: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])

    @property
    def guessed_values(self) -> int:
        """Return the number of values that the program read from tensors without data."""
        return self.notes.get(VALUE_GUESSED, ("", 0))[1]

    def note(self, code: str, message: str) -> None:
        """Count a finding."""
        self.notes[code] = (message, self.notes.get(code, ("", 0))[1] + 1)
