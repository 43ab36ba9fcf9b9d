"""Writer of StableHLO programs from the types of operands and results.

A graph stores the tensors of an operation, but not all attributes. This package infers attributes from types,
for the replay of a whole graph and for programs of one operation that are compiled and timed.
"""
