"""Reading of a program in the child process of :mod:`.sandbox`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from hespas.converters.format import ReadOptions
from hespas.converters.stablehlo import ATTACHMENT
from hespas.converters.stablehlo.dimensions import with_dims
from hespas.converters.stablehlo.mlir import load_bindings
from hespas.converters.stablehlo.op_numbers import FUNCTIONS, number_operations
from hespas.converters.stablehlo.program import ProgramForm, parse_program
from hespas.converters.stablehlo.program_graph import parsing, read_parsed
from hespas.files.sandbox import parser_memory, parser_time
from hespas.graph import Diagnostics
from hespas.graph.errors import HespasError, InvariantError
from hespas.graph.packing import pack

__all__ = ["read_in_child"]


def read_in_child(data: bytes, parser_bytes: int, settings_text: str) -> bytes:
    """Read a program in the child process, and return the result as bytes for
    :func:`.sandbox.read_in_sandbox`. The bytes are one line of JSON with diagnostics and any error, then the
    packed workload.

    The parser may use ``parser_bytes`` of memory. The program is left out of the workload's attachments if it
    equals the input.
    """
    settings: dict[str, Any] = json.loads(settings_text)
    options = ReadOptions(
        num_devices=settings["num_devices"],
        num_replicas=settings["num_replicas"],
        locations=settings["locations"],
    )
    diagnostics = Diagnostics(settings["keep"])
    source = data
    functions: list[str] = []
    try:
        bindings = load_bindings()
        with parsing(data, ""), parser_memory(parser_bytes), parser_time(len(data)):
            parsed = parse_program(data, bindings)
            if settings["dims"]:
                module = with_dims(parsed.module, settings["dims"], bindings)
                parsed = parsed._replace(module=module, form=ProgramForm.BYTECODE)
                source = bindings.bytecode(module)
            if settings["numbers_operations"]:
                functions = number_operations(parsed.module, bindings)
                parsed = parsed._replace(has_locations=True)
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
    if settings["numbers_operations"]:
        metadata = {**workload.metadata, FUNCTIONS: json.dumps(functions)}
        workload = replace(workload, classes=(replace(graph, attachments={}),), metadata=metadata)
        return _answer(diagnostics, None, attaches_input=False) + pack(workload)
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
    return json.dumps(head).encode() + b"\n"
