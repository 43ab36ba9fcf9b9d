"""External array simulators, run as separate programs, one product at a time."""
