"""`python -m areal.infra.launcher.local script.py --config FILE key=value...`: runs the script on
this machine. The same as `areal launch local --script`."""

from areal.infra.launcher import exec_launch

if __name__ == "__main__":
    exec_launch("local")
