"""All ranks, event by event."""

from __future__ import annotations

from collections.abc import Sequence

from hespas.simulator.astra.events import EventQueue
from hespas.simulator.astra.mailbox import Mailbox, MessageKey
from hespas.simulator.astra.memory import RemoteMemory
from hespas.simulator.astra.network import AwareNetwork, Network, UnawareNetwork
from hespas.simulator.astra.options import AstraOptions
from hespas.simulator.astra.plans import Planner
from hespas.simulator.astra.ranks import Rank
from hespas.simulator.astra.shared import Shared
from hespas.simulator.astra.traces import RankTrace

__all__ = ["run_all"]


def run_all(traces: Sequence[RankTrace], options: AstraOptions) -> tuple[list[Rank], list[MessageKey]]:
    """Run all ranks from time 0 until nothing happens any more; some may be left waiting. Beside them stand
    the messages that nobody asked for.
    """
    queue = EventQueue()
    wires: Network = (AwareNetwork if options.backend == "aware" else UnawareNetwork)(options.network, queue)
    mailbox = Mailbox(wires, queue)
    shared = Shared(
        queue=queue,
        mailbox=mailbox,
        memory=RemoteMemory(options.memory),
        planner=Planner(options.system, options.network),
        queues_per_dim=options.queues_per_dim,
    )
    ranks = [Rank(trace, shared) for trace in traces]
    for rank in ranks:
        rank.begin()
    queue.run()
    return ranks, mailbox.unreceived()
