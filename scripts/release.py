"""Builds the wheel of this checkout, tries it in an empty environment, and says what is left to do.

    python scripts/release.py               # wheel into dist/; installs torch and the rest: minutes
    python scripts/release.py --demo        # and trains the demo, for 12 steps
    python scripts/release.py --demo --borrow  # the same with the packages that lie here
    python scripts/release.py --only-build

`--borrow` installs the wheel alone and lends it the other packages of the environment that runs
this, so no network is needed; that they are the ones areal asks for is seen only without it.

Nothing of the checkout is changed, no tag is made, nothing is uploaded: that is the releaser's
part, and the last lines list it. Exit code 0: the wheel works; 1: a step failed, and its output
says why.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Run by the new environment's Python: a model that the recipe can name, and where the recipe lies.
MAKE_MODEL = """
from pathlib import Path
from areal.cli.demo import SFT_RECIPE, make_model, recipe_path
make_model(Path("demo/tiny_model"))
print(recipe_path(SFT_RECIPE))
"""


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        wheel = build(args.out, isolated=not args.borrow)
        print(f"built {wheel}", flush=True)
        if not args.only_build:
            try_out(wheel, with_demo=args.demo, borrow=args.borrow)
        steps = left_to_do(
            version(),
            changelog=(ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
            tags=run("git", "tag", "--list").split(),
            changes=run("git", "status", "--porcelain"),
        )
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    for number, step in enumerate([*steps, f"upload {wheel}"], start=1):
        print(f"{number}. {step}")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Build the wheel and try it in an empty venv.")
    made.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (dist/)")
    made.add_argument("--demo", action="store_true", help="also train the demo for 12 steps")
    made.add_argument(
        "--borrow", action="store_true", help="use the packages of this environment; no network"
    )
    made.add_argument("--only-build", action="store_true", help="build the wheel and stop")
    return made


def build(out: Path, *, isolated: bool) -> Path:
    """The wheel of this checkout, in `out`; without isolation by the hatchling that lies here."""
    options = [] if isolated else ["--no-build-isolation"]
    wheel = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *options)
    run(*wheel, "--wheel-dir", out, ROOT)
    return next(out.glob(f"areal-{version()}-*.whl"))


def try_out(wheel: Path, *, with_demo: bool, borrow: bool) -> None:
    """Install `wheel` into an empty environment and use it outside of the checkout."""
    # Without the caller's path, which could show the new environment this checkout.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="areal-release-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python, areal = folder / "venv/bin/python", folder / "venv/bin/areal"
        use = partial(run, cwd=folder, env=env)
        install = partial(use, python, "-m", "pip", "install", "--quiet")
        if borrow:
            install("--no-deps", wheel.resolve())
            lend(python)
        else:
            constrained = partial(install, "-c", ROOT / "constraints.txt")
            constrained("torch")  # first: the others then find the pinned build in place
            constrained(wheel.resolve())
        place = use(python, "-c", "import areal; print(areal.__file__)").strip()
        if not Path(place).resolve().is_relative_to(folder.resolve()):
            raise RuntimeError(f"areal was imported from {place}, expected it below {folder}")
        shown = use(areal, "--version")
        if shown.split() != ["areal", version()]:
            raise RuntimeError(f"areal --version printed {shown!r}, expected areal {version()}")
        recipe = use(python, "-c", MAKE_MODEL).split()[-1]
        print(use(areal, "check", recipe, "cluster.fileroot=demo"), end="")
        if with_demo:
            print(use(areal, "demo", "--json", "--out", "demo", "total_train_steps=12"), end="")


def lend(python: Path) -> None:
    """Let the environment of `python` import what this one has and it has not. areal itself is not
    lent where it is installed as a link to the checkout: links are followed in one's own only."""
    (own,) = (python.parents[1] / "lib").glob("python*/site-packages")
    folders = sorted({sysconfig.get_path(kind) for kind in ("purelib", "platlib")})
    (own / "lent.pth").write_text("\n".join(folders) + "\n", encoding="utf-8")


def left_to_do(version: str, *, changelog: str, tags: list[str], changes: str) -> list[str]:
    """What the releaser does by hand, in order; `changes` is what git status prints."""
    steps = []
    if changes:
        steps.append("commit or remove what git status lists, and run this again")
    if f"v{version}" in tags:
        steps.append(f"raise __version__ in areal/__init__.py: the tag v{version} exists")
        return steps
    if not re.search(rf"^## {re.escape(version)}\b", changelog, re.MULTILINE):
        steps.append(
            f"in CHANGELOG.md rename the section Unreleased to {version}, with the date, begin an "
            "empty one above it, and commit"
        )
    steps.append(f"git tag --annotate v{version} --message 'areal {version}'")
    steps.append(f"git push origin v{version}")
    return steps


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """What the command printed; CalledProcessError if it failed."""
    words = [str(word) for word in command]
    print("+", *words, file=sys.stderr, flush=True)
    ended = subprocess.run(words, cwd=cwd, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return ended.stdout


def version() -> str:
    text = (ROOT / "areal" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("areal/__init__.py has no line that sets __version__")
    return found[1]


if __name__ == "__main__":
    sys.exit(main())
