"""A live JAX or PyTorch program -> workload, for any number of devices, without those devices.

``jax/`` lowers and partitions programs of JAX, ``shardy/`` partitions any annotated StableHLO, ``aot/`` asks
the real compilers, ``torch/`` records what PyTorch dispatches. Each needs its extra; none is loaded before it
is used.
"""
