"""What is looked at before XLA gets a program: what it would drop in silence, or never be done with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from hespas.converters.stablehlo.mlir import Operation
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["check_shardings", "check_written_out"]

_SHARDING = "mhlo.sharding"
_MESSAGE = b"\x08"
_MOST_WRITTEN_OUT = 4_000_000
"""Operations that a program may have once its calls are written out, as XLA does."""


def check_shardings(operations: Sequence[Operation]) -> None:
    """Raise ``FormatError`` for a sharding of GSPMD that XLA cannot read: it would leave it out and say
    nothing.
    """
    known: set[bytes] = set()
    for op in operations:
        for value in _shardings(op):
            data: bytes = value.value_bytes
            if data not in known and not _is_sharding(data):
                raise FormatError(
                    f"{_SHARDING} {data[:80].decode(errors='replace')!r} is no sharding",
                    position=str(op.location),
                    hint="for example {devices=[2,4]<=[8]}, {replicated}, {manual}",
                )
            known.add(data)


def _shardings(op: Operation) -> Iterator[Any]:
    attributes: Any = op.attributes
    if _SHARDING in attributes:
        yield attributes[_SHARDING]
    if op.name == "func.func":
        for kind in ("arg_attrs", "res_attrs"):
            if kind in attributes:
                yield from (each[_SHARDING] for each in attributes[kind] if _SHARDING in each)


def _is_sharding(data: bytes) -> bool:
    """As XLA reads it: a message of protobuf, whose first field is the type, or text."""
    if not data or data.startswith(_MESSAGE):
        return True
    hlo: Any = import_module("jaxlib._hlo")
    try:
        hlo.HloSharding.from_string(data.decode())
    except (RuntimeError, UnicodeDecodeError):
        return False
    return True


def check_written_out(operations: Sequence[Operation]) -> None:
    """Raise ``FormatError`` where functions call themselves, ``UnsupportedError`` where calls of calls make a
    small program an endless one. ``operations`` are in order of their ends, as MLIR walks.
    """
    own, calls = _functions(operations)
    sizes, above = dict[str, int](), list[str]()
    waiting = list(own)
    while waiting:
        name = waiting[-1]
        missing = [each for each in calls[name] if each in own and each not in sizes]
        if name in sizes or not missing:
            waiting.pop()
            if above and above[-1] == name:
                above.pop()
            sizes[name] = own[name] + sum(times * sizes.get(each, 0) for each, times in calls[name].items())
            continue
        above.append(name)
        entered = set(above)
        if again := next((each for each in missing if each in entered), None):
            raise FormatError(f"function {again} calls itself", hint="write it as stablehlo.while")
        waiting.extend(missing)
    most = max(sizes, key=sizes.__getitem__, default="")
    if most and sizes[most] > _MOST_WRITTEN_OUT:
        raise UnsupportedError(
            f"function {most} has {sizes[most]:,} operations with those that it calls, at most "
            f"{_MOST_WRITTEN_OUT:,} are partitioned",
            hint="write what repeats as a loop (jax.lax.scan)",
        )


def _functions(operations: Sequence[Operation]) -> tuple[dict[str, int], dict[str, Counter[str]]]:
    """Of each function the number of its operations and how often it calls which."""
    own, calls = dict[str, int](), dict[str, Counter[str]]()
    inside, called = 0, Counter[str]()
    for op in operations:
        if op.name == "func.func":
            name = "@" + str(op.attributes["sym_name"]).strip('"')
            own[name], calls[name] = inside, called
            inside, called = 0, Counter[str]()
        else:
            inside += 1
            if op.name == "func.call":
                called[str(op.attributes["callee"])] += 1
    return own, calls
