"""Adapters of external simulators of systolic arrays, which run as separate programs and simulate one matrix
product per run.
"""
