"""What each operation costs: the one table that the StableHLO and HLO readers share, and that of PyTorch."""
