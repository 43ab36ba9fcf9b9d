"""FLOPs and bytes of operations: the table shared by the StableHLO and HLO readers, and that of PyTorch."""
