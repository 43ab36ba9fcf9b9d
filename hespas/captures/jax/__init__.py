"""Capture and profiling of JAX programs."""
