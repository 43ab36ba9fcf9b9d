"""Programs of StableHLO as text: operations written from the types of their operands and results.

A graph keeps what an operation works on, not every attribute of it. What the types imply is inferred here,
for the replay of a whole graph and for a program of one operation that is compiled and timed.
"""
