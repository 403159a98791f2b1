"""The command `areal`: `main.py` finds the subcommand, each subcommand is a file of its own."""
