"""`python -m areal.tools.validate_installation`, AReaL's name of `areal validate`."""

from __future__ import annotations

import sys

from areal.infra.installation import validate, verdict


def main() -> int:
    findings = list(validate())
    code, text = verdict(findings)
    print(*findings, text, sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
