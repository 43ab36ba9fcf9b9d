"""FLOPs and bytes of operations: a cost table for StableHLO and HLO, and one for PyTorch operations."""
