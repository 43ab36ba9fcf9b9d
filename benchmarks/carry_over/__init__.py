"""How far estimates carry over: tests that leave out what a user's work will not have in common with the
data.
"""
