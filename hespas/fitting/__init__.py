"""Fits: device forms, learned models, effects on whole steps; errors on held-out rows; intervals."""
