"""Fitting of estimators to measurements: formulas of devices, learned models, and corrections of whole steps,
with errors and intervals from held-out rows.
"""
