"""What databases of GPU profilers (Nsight Systems, rocprofv3) share: reading SQLite safely, and from device
work, launches and ranges on the host to a :class:`~hespas.graph.Profile`.
"""
