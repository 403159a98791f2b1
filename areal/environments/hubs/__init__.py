"""Environments of hubs, each run by a Python environment of its own.

catalog.py   the hubs, their pinned packages, and how a run names an environment
remote.py    an environment whose code runs in the hub's Python
bridge.py    the program in the hub's Python; imports nothing of areal
"""
