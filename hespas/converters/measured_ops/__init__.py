"""Measured profiles with host operations as op graphs of their device work, each operation with its cost."""
