"""Ground truth of this machine: programs, their compiled forms, traces and times, kept as a small data set.

How to run it on a GPU, and what comes out: README.md beside this file.
"""
