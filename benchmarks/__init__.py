"""Benchmarks of speed, memory and accuracy, as ratios against a floor or peer of the same run."""
