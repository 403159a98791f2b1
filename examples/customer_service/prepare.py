"""Makes a tiny model that can call tools, of the one that `areal demo` leaves.

    python examples/customer_service/prepare.py

Only its chat template differs: the comment in it says that calls are written [name(key=1)].
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

TEMPLATE = (
    "{# calls: [func_name1(key=1)] #}"
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
)


def main(demo: str = "runs/demo") -> None:
    from areal.utils.fs import atomic_folder
    from areal.utils.tokenizer import load_hf_tokenizer

    source, target = Path(demo, "tiny_model"), Path(demo, "service", "tiny_model")
    if not source.is_dir():
        sys.exit(f"{source} is no folder; run `areal demo` once, or name its folder")
    if target.is_dir():
        return
    tokenizer = load_hf_tokenizer(str(source))
    tokenizer.chat_template = TEMPLATE
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(target, private=False) as scratch:
        shutil.copytree(source, scratch, dirs_exist_ok=True)
        tokenizer.save_pretrained(str(scratch))


if __name__ == "__main__":
    main(*sys.argv[1:])
