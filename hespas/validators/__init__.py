"""Four products: the checker, the round trip, the accuracy of estimates, and calibration."""
