"""What may be asked of the simulation of a job."""

from __future__ import annotations

from typing import Literal

__all__ = ["DIFFERING", "PROTOCOLS", "STARTS", "Differing", "Protocol", "Starts"]

Protocol = Literal["eager", "rendezvous"]
PROTOCOLS: tuple[Protocol, ...] = ("eager", "rendezvous")
"""Whether who sends a message is done when it has left, or waits for the receiver to be there, too."""

Differing = Literal["longest", "shortest"]
DIFFERING: tuple[Differing, ...] = ("longest", "shortest")
"""How long communication takes whose members state different times. What was recorded has waits for others in
it, and least of them where the last one came."""

Starts = Literal["together", "recorded"]
STARTS: tuple[Starts, ...] = ("together", "recorded")
"""When ranks begin."""
