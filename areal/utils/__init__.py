"""Leaf modules: every other package may import them; they import nothing above `areal.api`."""
