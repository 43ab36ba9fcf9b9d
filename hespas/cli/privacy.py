"""``hespas-validate privacy``."""

from __future__ import annotations

from hespas.api.attacks import privacy as attack
from hespas.cli.command import Call, command
from hespas.cli.terminal import emit, report_diagnostics

__all__ = ["privacy"]


@command(attack, progress="attacking", has_page=True)
def privacy(call: Call) -> None:
    """Attack obfuscated workloads with 20 public models, and compare their simulated times.

    hespas-validate privacy traces/ shared/ --model llama-3-8b
    """
    from hespas import api

    done = call.run(api.privacy)
    call.write_json(done.to_json())
    call.write_html(done)
    report_diagnostics(done.diagnostics, done.original)
    emit(done.table().to_text())
    emit(done.headline())
