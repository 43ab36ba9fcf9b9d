"""Reading of a program in a child process, so that no parser in this process reads the input.

jaxlib's parsers crash on some damaged files and reserve gigabytes for others, and a few hundred bytes may
represent types, locations or numbers that take forever to print. A crash, an endless loop or a lack of memory
in the child becomes an error message here. The child returns the graph of a valid program as columns.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hespas.converters.format import ReadOptions
from hespas.converters.stablehlo import ATTACHMENT, BYTECODE_MAGIC
from hespas.converters.stablehlo.mlir import load_bindings
from hespas.files.limits import parser_hint
from hespas.files.sandbox import ParserFailedError, run_sandboxed
from hespas.graph import Diagnostic, Diagnostics, Severity, Workload
from hespas.graph.errors import FormatError, MissingExtraError, UnsupportedError, UsageError
from hespas.graph.packing import unpack

__all__ = ["read_in_sandbox"]

_CHILD = "hespas.converters.stablehlo.child:read_in_child"
"""Loaded only in the child: the parent needs neither the bindings nor the costs of operations."""

_REFUSALS = {kind.__name__: kind for kind in (FormatError, UnsupportedError, UsageError)}


def read_in_sandbox(
    data: bytes,
    path: str,
    options: ReadOptions,
    diagnostics: Diagnostics,
    *,
    numbers_operations: bool = False,
) -> Workload:
    """Read a program in a child process. Its diagnostics are added to ``diagnostics``. If
    ``numbers_operations`` is True, the positions of operations replace their names (:mod:`.op_numbers`).

    Raises the errors of the reader. Raises ``FormatError`` if the child crashes, hangs or needs too much
    memory, ``UnsupportedError`` if it does not start, ``MissingExtraError`` if a binding of jaxlib is absent.
    """
    settings = {
        "path": path,
        "keep": max(diagnostics.keep, 1),
        "num_devices": options.num_devices,
        "num_replicas": options.num_replicas,
        "locations": options.locations,
        "dims": dict(options.dims),
        "numbers_operations": numbers_operations,
    }
    try:
        reply = run_sandboxed(_CHILD, data, "jaxlib's parser", json.dumps(settings))
    except ParserFailedError as error:
        is_binary = BYTECODE_MAGIC in data
        hint = "write or copy the file again" if is_binary else "no compiler writes such programs"
        hint = parser_hint(hint)
        raise FormatError(
            f"a damaged program: it {error}", path=path, position=f"within {len(data):,} bytes", hint=hint
        ) from None
    head, _, packed = reply.partition(b"\n")
    answer: dict[str, Any] = json.loads(head)
    for finding, count in answer["findings"]:
        finding["severity"] = Severity(finding["severity"])
        diagnostics.record(Diagnostic(**finding), count)
    if (refusal := answer["refusal"]) is not None:
        if refusal["kind"] == MissingExtraError.__name__:
            load_bindings()  # raises the same error, of the same installation
        kind = _REFUSALS[refusal["kind"]]
        raise kind(refusal["message"], path=path, position=refusal["position"], hint=refusal["hint"])
    workload = unpack(packed)
    if not answer["attaches_input"]:
        return workload
    (graph,) = workload.classes
    return replace(workload, classes=(replace(graph, attachments={**graph.attachments, ATTACHMENT: data}),))
