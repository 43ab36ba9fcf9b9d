"""Five products: the checker, the round trip, the accuracy of estimates, calibration, and captures."""
