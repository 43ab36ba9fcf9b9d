"""What all ranks of a run share."""

from __future__ import annotations

from dataclasses import dataclass

from hespas.simulator.astra.events import EventQueue
from hespas.simulator.astra.mailbox import Mailbox
from hespas.simulator.astra.memory import RemoteMemory
from hespas.simulator.astra.phases import Machines, machine_of
from hespas.simulator.astra.plans import Planner

__all__ = ["Shared"]


@dataclass(frozen=True, slots=True)
class Shared:
    """The clock, the wires, remote memory, and how collectives are run: ``machines`` makes what a rank does
    in a phase.
    """

    queue: EventQueue
    mailbox: Mailbox
    memory: RemoteMemory
    planner: Planner
    queues_per_dim: int
    machines: Machines = machine_of
