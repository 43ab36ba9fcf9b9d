"""Held-out tests of estimates: devices, sizes, models and ranks that are absent from the fitted rows."""
