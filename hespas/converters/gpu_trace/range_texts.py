"""What a range on the host says: an operation of PyTorch with its shapes, an instruction of XLA, or a name.

PyTorch's ``emit_nvtx`` writes ``aten::mm, seq = 3, op_id = 7, sizes = [[4, 8], [8, 2]], input_op_ids = [..]``
with the parts it has (``torch/csrc/profiler/util.cpp``, ``getNvtxStr``; on ROCm the same goes to roctx). XLA
writes ``Thunk:#hlo_op=fusion.1,hlo_module=jit_f#`` (``tsl/profiler/lib/traceme_encode.h``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

__all__ = ["RangeText", "parse_range_text"]

_MOST_DIGITS = 18
_STEP = re.compile(
    r"(?:ProfilerStep#|(?:step|iter|iteration)[ _#:=]{0,2})(\d{1,9})", re.ASCII | re.IGNORECASE
)
_MOST_SIZES = 1 << 20
_SIZES = msgspec.json.Decoder(list[list[int]])


@dataclass(frozen=True, slots=True)
class RangeText:
    """``shapes`` is a JSON text, ``sequence`` joins forward and backward; "" and -1 for what is not said.

    ``step`` is the number of a step of training or inference that the text names.
    """

    name: str
    shapes: str = ""
    sequence: int = -1
    module: str = ""
    instruction: str = ""
    step: int = -1


def parse_range_text(text: str) -> RangeText:
    """Read one text. What does not follow a known form is a name as a whole. O(len(text))."""
    if text.endswith("#") and "#" in text[:-1]:
        return _traceme(text)
    head, _, _ = text.partition(", input_op_ids = ")
    head, _, sizes = head.partition(", sizes = ")
    head, _, operation = head.partition(", op_id = ")
    name, _, sequence = head.partition(", seq = ")
    if not name or not _is_count(operation) or not _is_count(sequence):
        return RangeText(text)
    if sizes and not _are_sizes(sizes):
        return RangeText(text)
    step = _STEP.fullmatch(name)
    return RangeText(
        name, sizes, int(sequence) if sequence else -1, step=int(step[1]) if step else -1
    )  # fmt: skip


def _is_count(part: str) -> bool:
    return not part or (part.isdecimal() and part.isascii() and len(part) <= _MOST_DIGITS)


def _are_sizes(text: str) -> bool:
    if len(text) > _MOST_SIZES:
        return False
    try:
        _SIZES.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True


def _traceme(text: str) -> RangeText:
    name, _, rest = text[:-1].partition("#")
    facts: dict[str, str] = {}
    for part in rest.split(","):
        key, found, value = part.partition("=")
        if found:
            facts.setdefault(key.strip(), value)
    instruction, module = facts.get("hlo_op", ""), facts.get("hlo_module", "")
    step = facts.get("step_num", "")
    return RangeText(
        instruction or facts.get("name", "") or name.rstrip(":") or text,
        module=module,
        instruction=instruction,
        step=int(step) if step and _is_count(step) and len(step) < 10 else -1,
    )
