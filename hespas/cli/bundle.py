"""``hespas bundle``: profiler traces of several ranks as one archive for Perfetto."""

from __future__ import annotations

from hespas.api.bundling import bundle as bundle_traces
from hespas.cli.command import Call, command
from hespas.cli.terminal import emit, report_diagnostics
from hespas.report.texts import bytes_text

__all__ = ["bundle"]


@command(bundle_traces)
def bundle(call: Call) -> None:
    """Pack the PyTorch traces of a job into one archive that ui.perfetto.dev opens as one timeline.

    hespas bundle traces/ --out job.zip
    """
    done = call.run(bundle_traces)
    call.write_json(done.to_json())
    report_diagnostics(call.diagnostics, call.subject)
    emit(f"{done.headline()} ({bytes_text(done.size_bytes)})")
    emit(done.table().to_text())
