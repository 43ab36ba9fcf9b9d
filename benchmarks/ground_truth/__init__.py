"""Ground truth of this machine: a small data set of programs, their compiled forms, traces and times.

README.md in this folder describes how to run it on a GPU, and the output.
"""
