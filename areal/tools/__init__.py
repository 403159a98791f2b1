"""Programs beside the command line, run by `python -m areal.tools.NAME`."""
