"""Engines: those that train (archon) and those that generate (native)."""
