"""Child process that reads a program, so that no byte of the input reaches a parser of this process.

jaxlib's parsers crash on some damaged bytes and reserve gigabytes for others, and a few hundred bytes may
represent types, locations or numbers that take forever to print. A crash, an endless loop or a lack of memory
in the child becomes an error message here. The graph of an accepted program returns as columns.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from hespas.converters.format import ReadOptions
from hespas.converters.stablehlo import BYTECODE_MAGIC
from hespas.converters.stablehlo.dimensions import with_dims
from hespas.converters.stablehlo.mlir import load_bindings
from hespas.converters.stablehlo.program import ProgramForm, parse_program
from hespas.converters.stablehlo.program_graph import ATTACHMENT, parsing, read_parsed
from hespas.files.limits import parser_hint
from hespas.files.sandbox import ParserFailedError, parser_memory, parser_time, run_sandboxed
from hespas.graph import Diagnostic, Diagnostics, Severity, Workload
from hespas.graph.errors import (
    FormatError,
    HespasError,
    InvariantError,
    MissingExtraError,
    UnsupportedError,
    UsageError,
)
from hespas.graph.packing import pack, unpack

__all__ = ["read_in_child", "read_in_sandbox"]

_REFUSALS = {kind.__name__: kind for kind in (FormatError, UnsupportedError, UsageError)}
_NEWLINE = b"\n"


def read_in_sandbox(data: bytes, path: str, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a program in a child process; its findings are added to ``diagnostics``.

    Raises the reader's error, ``FormatError`` if the child crashes, hangs or needs too much memory,
    ``UnsupportedError`` if it does not start, ``MissingExtraError`` if a binding of jaxlib is absent.
    """
    settings = {
        "path": path,
        "keep": max(diagnostics.keep, 1),
        "num_devices": options.num_devices,
        "num_replicas": options.num_replicas,
        "locations": options.locations,
        "dims": dict(options.dims),
    }
    try:
        reply = run_sandboxed(f"{__name__}:read_in_child", data, "jaxlib's parser", json.dumps(settings))
    except ParserFailedError as error:
        is_binary = BYTECODE_MAGIC in data
        hint = "write or copy the file again" if is_binary else "no compiler writes such programs"
        hint = parser_hint(hint)
        raise FormatError(
            f"a damaged program: it {error}", path=path, position=f"within {len(data):,} bytes", hint=hint
        ) from None
    head, _, packed = reply.partition(_NEWLINE)
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


def read_in_child(data: bytes, parser_bytes: int, settings_text: str) -> bytes:
    """Return findings, refusal and packed workload of a program for :func:`read_in_sandbox`.

    Runs in the child. The parser gets ``parser_bytes`` of memory. The answer is a line of JSON and the
    workload; an attached program that equals the input is left out.
    """
    settings: dict[str, Any] = json.loads(settings_text)
    options = ReadOptions(
        num_devices=settings["num_devices"],
        num_replicas=settings["num_replicas"],
        locations=settings["locations"],
    )
    diagnostics = Diagnostics(settings["keep"])
    source = data
    try:
        bindings = load_bindings()
        with parsing(data, ""), parser_memory(parser_bytes), parser_time(len(data)):
            parsed = parse_program(data, bindings)
            if settings["dims"]:
                module = with_dims(parsed.module, settings["dims"], bindings)
                parsed = parsed._replace(module=module, form=ProgramForm.BYTECODE)
                source = bindings.bytecode(module)
        workload = read_parsed(
            source,
            parsed,
            bindings,
            path=settings["path"],
            options=options,
            diagnostics=diagnostics,
        )
    except InvariantError:
        raise
    except HespasError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, RuntimeError):  # the child's limits, whatever was found before
            diagnostics = Diagnostics()
        refusal = {
            "kind": type(error).__name__,
            "message": error.message,
            "position": error.position,
            "hint": error.hint,
        }
        return _answer(diagnostics, refusal)
    (graph,) = workload.classes
    attaches_input = graph.attachments.get(ATTACHMENT) is data
    if attaches_input:
        attachments = {name: content for name, content in graph.attachments.items() if name != ATTACHMENT}
        workload = replace(workload, classes=(replace(graph, attachments=attachments),))
    return _answer(diagnostics, None, attaches_input=attaches_input) + pack(workload)


def _answer(
    diagnostics: Diagnostics, refusal: dict[str, str | None] | None, *, attaches_input: bool = False
) -> bytes:
    findings = [
        ({**asdict(finding), "severity": finding.severity.value}, count)
        for finding, count in diagnostics.tallies()
    ]
    head = {"findings": findings, "refusal": refusal, "attaches_input": attaches_input}
    return json.dumps(head).encode() + _NEWLINE
