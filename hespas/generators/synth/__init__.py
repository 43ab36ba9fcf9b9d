"""Synthesis of graphs and jobs that keep the statistics of their sources."""
