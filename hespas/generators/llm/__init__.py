"""Language models, trained or served at any parallelism, as workloads of rank classes."""

__all__: list[str] = []
