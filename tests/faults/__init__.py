"""Writers that are interrupted. ``python -m tests.faults.kills`` is the long form of the kills."""
