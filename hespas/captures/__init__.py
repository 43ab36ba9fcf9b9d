"""Capture of a JAX or PyTorch program as a workload for any number of devices, without those devices.

``jax/`` lowers and profiles JAX programs, ``partition`` partitions any annotated StableHLO, ``aot/`` runs the
real compilers, ``torch/`` records the operations that PyTorch dispatches. Each needs an optional extra, which
is imported on first use.
"""
