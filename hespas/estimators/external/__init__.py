"""Array simulators of others, run as programs of their own, one product at a time."""
