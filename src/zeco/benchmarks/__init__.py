"""Measurements: records of figures with machine, versions and commit."""
