"""Reads optimised or unoptimised HLO into a :class:`~hespas.graph.Workload`.

Text needs nothing but this package; a serialised ``HloModuleProto`` is printed as text by jaxlib first.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path

from hespas.converters.format import ReadOptions
from hespas.converters.hlo.bindings import proto_to_text
from hespas.converters.hlo.bodies import Bodies
from hespas.converters.hlo.callgraph import callees_first, check_inlined_size
from hespas.converters.hlo.communication import Communication
from hespas.converters.hlo.devices import device_counts, warn_if_global
from hespas.converters.hlo.emit import Emitter
from hespas.converters.hlo.findings import Findings
from hespas.converters.hlo.lower import Lowering
from hespas.converters.hlo.module import HloModule
from hespas.converters.hlo.parser import parse_module
from hespas.converters.hlo.program import Program
from hespas.converters.hlo.scan import Source
from hespas.converters.hlo.sniff import is_text, module_bytes
from hespas.converters.hlo.sugar import shorten_async
from hespas.converters.hlo.verify import check_shapes
from hespas.files.source import read_bytes
from hespas.graph import WHOLE_JOB, Diagnostics, Workload
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.graph.passes import materialise

__all__ = ["read_hlo", "source_of", "workload_of"]

_LIMIT_HINT = "convert a smaller program, or let XLA inline its calls first (--xla_dump_to after passes)"
_FAULT_HINT = "dump the module again; XLA itself does not print such an instruction"
_HINT = "give the text or the .pb that --xla_dump_to writes"


def read_hlo(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a file. Raises ``FormatError``, ``UnsupportedError``, and ``MissingExtraError`` for a proto
    without jaxlib.
    """
    data = read_bytes(path, options.max_bytes)
    module = parse_module(source_of(data, str(path)))
    try:
        return workload_of(module, options, diagnostics)
    except FormatError as error:  # of an attribute: what was expected is known, what was meant is not
        error.hint = error.hint or _FAULT_HINT
        raise
    except UnsupportedError as error:
        error.hint = error.hint or _LIMIT_HINT
        raise


def source_of(data: bytes, path: str) -> Source:
    """The text of a module in any form. Raises ``FormatError`` where the bytes are none."""
    data = data.removeprefix(BOM_UTF8)
    if is_text(data):
        try:
            return Source(data.decode("utf-8"), path)
        except UnicodeDecodeError as error:
            raise FormatError(
                f"expected UTF-8 text: {error.reason}", path=path, position=f"byte {error.start}", hint=_HINT
            ) from error
    module = module_bytes(data)
    if module is not None:
        return Source(proto_to_text(module, path), path, origin="module printed as text, ")
    raise FormatError(
        "expected 'HloModule' or a serialised HloModuleProto",
        path=path,
        position="line 1, byte 0",
        hint=_HINT,
    )


def workload_of(module: HloModule, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """The workload of a parsed module: one graph that all devices run. O(instructions written out)."""
    ordered = callees_first(module)
    if not module.marked and len(module.computations) > 1:
        diagnostics.warning(
            "hlo.no-entry",
            module.name,
            f"no computation is marked ENTRY; the last one, {module.entry.name}, is taken, as XLA does",
            path=module.source.path,
        )
    program = Program(module)
    check_shapes(program, ordered)
    shorten_async(module.computations)
    check_inlined_size(module, ordered)
    replicas, partitions = device_counts(module, options, diagnostics)
    is_global = warn_if_global(module, partitions, diagnostics)
    bodies = Bodies(program)
    for computation in ordered[:-1]:
        bodies.add(computation)
    findings = Findings(program)
    emitter = Emitter(program, findings, locations=options.locations)
    communication = Communication(emitter, replicas, partitions)
    Lowering(emitter, bodies, communication).run()
    findings.report(diagnostics)
    for key, value in module.attributes.items():
        emitter.builder.add_extra(-1, key, 0, value.encode("utf-8", "surrogatepass"))
    graph = emitter.builder.build()
    if not program.is_scheduled:  # what a compiler left as an operation of its own has its cost by its rule
        graph = materialise(graph)
    metadata = {
        **_metadata(module, replicas, partitions),
        **({WHOLE_JOB: str(partitions)} if is_global else {}),
    }
    return Workload.spmd(graph, communication.num_devices, metadata)


def _metadata(module: HloModule, replicas: int, partitions: int) -> dict[str, str]:
    return {
        "format": "hlo",
        "module": module.name,
        "entry": module.entry.name,
        "is_scheduled": module.attributes.get("is_scheduled", "false"),
        "num_replicas": str(replicas),
        "num_partitions": str(partitions),
        "num_computations": str(len(module.computations)),
        "num_instructions": str(module.num_instructions),
    }
