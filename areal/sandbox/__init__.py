"""Untrusted code (reward functions, agents) in a pool of confined worker processes."""
