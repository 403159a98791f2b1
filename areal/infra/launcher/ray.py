"""`python -m areal.infra.launcher.ray script.py --config FILE key=value...`: runs the script on the
Ray cluster of RAY_ADDRESS, else on one on this machine. The same as `areal launch ray --script`."""

from areal.infra.launcher import exec_launch

if __name__ == "__main__":
    exec_launch("ray")
