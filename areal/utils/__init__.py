"""Leaves: small tools every other package may import, and that import nothing above `areal.api`."""
