"""``hespas-validate conform``."""

from __future__ import annotations

import typer

from hespas.api.conformance import conform as run_conformance
from hespas.cli.command import Call, command
from hespas.cli.terminal import emit, is_quiet
from hespas.graph.hints import INPUT, OUTPUT

__all__ = ["conform"]


@command(run_conformance, progress="cases", panels=(OUTPUT, INPUT), has_page=True)
def conform(call: Call) -> None:
    """Test a tool with 200 sets of execution traces whose results are known; name each case that fails.

    hespas-validate conform --tool ./AstraSim_Analytical_Congestion_Unaware --adapter astra-sim
    """
    from hespas import api
    from hespas.validators.conformance import failures_table, kinds_table

    report = call.run(api.conform)
    call.write_json(report.to_json())
    call.write_html(report)
    if not is_quiet():
        emit(kinds_table(report.details).to_text())
    if report.failures:
        emit(failures_table(report.details).to_text())
    emit(report.headline())
    if not report.valid:
        raise typer.Exit(1)
