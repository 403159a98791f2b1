"""The command `areal`: `main.py` dispatches to the subcommands, one file each."""
