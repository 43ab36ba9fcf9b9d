"""Mode ``astra``: the step of a job as ASTRA-sim's analytical simulator has it, to the nanosecond.

Rules and units are those of ASTRA-sim 518bd51 (https://github.com/astra-sim/astra-sim) with its analytical
network 599a047.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.simulator.astra.deadlock import check_finished
from hespas.simulator.astra.engine import run_all
from hespas.simulator.astra.lockstep import run_alike
from hespas.simulator.astra.mailbox import MessageKey
from hespas.simulator.astra.network import checked
from hespas.simulator.astra.options import AstraOptions
from hespas.simulator.astra.plans import Planner
from hespas.simulator.astra.results import AstraSimulation, simulation_of
from hespas.simulator.astra.runs import Run
from hespas.simulator.astra.traces import GroupNames, JobTraces, StatedCosts

__all__ = ["simulate_astra"]


def simulate_astra(
    workload: Workload,
    options: AstraOptions,
    stated: Sequence[StatedCosts],
    group_number: GroupNames,
    diagnostics: Diagnostics,
) -> AstraSimulation:
    """Run a workload as its Chakra traces say. ``stated`` are the costs that the traces of each class state;
    ``group_number`` gives the number of a rank's process group.

    Raises ``UsageError`` where network and workload have different numbers of ranks, ``UnsupportedError`` and
    ``FormatError`` for what ASTRA-sim does not run, ``CheckFailedError`` where ranks never finish.
    """
    options = replace(options, network=checked(options.network, options.backend))
    _check_ranks(workload, options)
    Planner(options.system, options.network).check_files()
    if options.system.models_shared_bus:
        raise UnsupportedError(
            "model-shared-bus is not modelled", path=options.system.path, position="model-shared-bus",
            hint="set it to 0: the analytical networks are used without it",
        )  # fmt: skip
    _tell_unread(options, diagnostics)
    traces = JobTraces.of(workload, options.system, stated, group_number)
    run = run_alike(traces, options)
    if run is None:
        ranks, left = run_all(traces.of_ranks(range(workload.num_ranks)), options)
        check_finished(ranks, diagnostics)
        _tell_unreceived(left, diagnostics)
        run = Run([rank.result() for rank in ranks], np.arange(len(ranks)))
    return simulation_of(workload, options, run)


def _check_ranks(workload: Workload, options: AstraOptions) -> None:
    there, wanted = workload.num_ranks, options.network.num_ranks
    if not workload.is_complete:
        raise UsageError(
            f"{workload.num_available:,} of {there:,} ranks are here, and each needs its trace",
            hint="give the folder with the traces of all ranks",
        )
    if there != wanted:
        raise UsageError(
            f"the workload has {there:,} ranks, and the network {wanted:,} NPUs", code="ET022",
            path=options.network.path, position="npus_count",
            hint=f"make npus_count of all dimensions multiply to {there:,}",
        )  # fmt: skip


def _tell_unreceived(left: Sequence[MessageKey], diagnostics: Diagnostics) -> None:
    """ASTRA-sim ends a send when its message arrives, whether or not it is asked for, and says nothing."""
    for key in left:
        diagnostics.warning(
            "simulate.unreceived", f"rank {key.target}",
            f"a message of {key.size:,} bytes with tag {key.tag} from rank {key.source} is never received",
        )  # fmt: skip


def _tell_unread(options: AstraOptions, diagnostics: Diagnostics) -> None:
    for config in (options.system, options.network, options.memory):
        if config is not None and config.unread:
            diagnostics.info(
                "simulate.unread-keys", config.path, f"change no time: {', '.join(config.unread)}",
                path=config.path, count=len(config.unread),
            )  # fmt: skip
