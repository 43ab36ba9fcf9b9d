"""Whether a program is the one that ran: names alone do not say so, as one source compiles to many programs.

A profile that brings its compiled modules along says what each instruction makes, for how many devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hespas.converters import ReadOptions
from hespas.converters.hlo.parser import parse_module
from hespas.converters.hlo.reader import source_of, workload_of
from hespas.graph import Diagnostics, OpGraph, Profile, Workload
from hespas.graph.errors import HespasError

__all__ = ["OTHER_PROGRAM", "check_program", "compiled_module", "other_modules"]

OTHER_PROGRAM = "match.other-program"
_ATTACHED = "hlo/"
_LEAST_ALIKE = 0.9
"""A program whose instructions make other shapes than this share of those that ran is another program."""

_MOST_APART = 2.0
"""Compilers change the FLOPs of products, but not by such a factor."""


def compiled_module(profile: Profile, module: str) -> Workload | None:
    """A module that the profile brings along; None where there is none, or it cannot be read."""
    data = profile.attachments.get(_ATTACHED + module)
    if data is None:
        return None
    try:
        return workload_of(parse_module(source_of(data, module)), ReadOptions(), Diagnostics())
    except (HespasError, ValueError):  # ValueError: of an attribute; whoever matches by it reports it
        return None


def other_modules(
    graph: OpGraph,
    profile: Profile,
    own: Mapping[str, Sequence[str]],
    instructions: Mapping[str, Sequence[int]],
    diagnostics: Diagnostics,
) -> set[str]:
    """Those of the modules ``own``, whose instructions are called as the program's, that are another program:
    their instructions make results of other shapes. ``own`` are the names of the instructions that ran, by
    module; ``instructions`` nodes by name. A warning tells each, and each module without HLO that lacks many
    names.
    """
    found: set[str] = set()
    for module, ran in own.items():
        shared = [op for op in ran if op in instructions]
        compiled = compiled_module(profile, module)
        if compiled is None:
            if len(shared) < _LEAST_ALIKE * len(ran):
                diagnostics.warning(
                    OTHER_PROGRAM,
                    profile.name,
                    f"module {module or '(unnamed)'}: the program has {len(shared):,} of the {len(ran):,} "
                    "instructions that ran: is it the program that ran?",
                )
            continue
        real = compiled.classes[0]
        nodes = {real.node_name(node): node for node in range(len(real))}
        alike = sum(_alike(graph, instructions[op][0], real, nodes.get(op, -1)) for op in shared)
        if alike < _LEAST_ALIKE * len(shared):
            found.add(module)
            diagnostics.warning(
                OTHER_PROGRAM,
                profile.name,
                f"module {module}: another program ran: of {len(shared):,} instructions of equal name "
                f"{alike:,} make results of equal shape; nothing of it is matched",
            )
    return found


def _alike(graph: OpGraph, node: int, real: OpGraph, other: int) -> bool:
    """Whether both make the same; where one does not say what, nothing speaks against it."""
    if other < 0:
        return False
    one, two = _made(graph, node), _made(real, other)
    return one == two or not one or not two


def _made(graph: OpGraph, node: int) -> list[tuple[str, tuple[int, ...]]]:
    types = graph.types
    rows: list[int] = graph.results.row(node).tolist()
    elements = [types.dtype_of(row) for row in rows]
    return [
        ("" if element is None else element.name, tuple(types.shape(row)))
        for element, row in zip(elements, rows, strict=True)
    ]


def check_program(workload: Workload, profile: Profile, diagnostics: Diagnostics) -> None:
    """Warn where the modules of ``profile``, all of them matched with the program, ran on another number of
    devices than the program is for, or their products do another number of FLOPs. O(modules read).
    """
    for row in np.unique(profile.module_row).tolist():
        module = profile.strings[row]
        compiled = compiled_module(profile, module)
        if compiled is None:
            continue
        devices = compiled.num_ranks
        if devices != workload.num_ranks:
            diagnostics.warning(
                OTHER_PROGRAM,
                profile.name,
                f"module {module} is for {devices:,} ranks, and the program for {workload.num_ranks:,}: "
                "is it the program that ran?",
            )
            continue
        graph, *others = workload.classes
        if others:
            continue
        real = compiled.classes[0]
        asked, did = _product_flops(graph), _product_flops(real) * devices
        # A program before it is partitioned has the FLOPs of all devices, or, where it is partitioned by
        # hand, of one.
        if did and asked and not asked / _MOST_APART <= did <= asked * devices * _MOST_APART:
            diagnostics.warning(
                OTHER_PROGRAM,
                profile.name,
                f"the products of module {module} do {did:.3g} FLOPs, those of the program {asked:.3g}: "
                "is it the program that ran?",
            )


def _product_flops(graph: OpGraph) -> float:
    """FLOPs of all products in a step; 0 where some are unknown, or within library calls."""
    if "custom-call" in (graph.strings[row] for row in np.unique(graph.op_row).tolist()):
        return 0.0
    products = graph.contractions
    total = float((products.flops * graph.multiplicity[products.node]).sum())
    return total if np.isfinite(total) else 0.0
