"""How far estimates carry over: tests that leave out what a user's work does not share with the data."""
