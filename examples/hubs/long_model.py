"""The warm-started model of `areal demo`, in a copy that may read 1,024 tokens instead of 256.

python examples/hubs/long_model.py runs/demo
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path


def main(demo: str) -> None:
    target = Path(demo, "long_model")
    shutil.copytree(Path(demo, "arithmetic/sft/model"), target, dirs_exist_ok=True)
    config = target / "config.json"
    longer = json.loads(config.read_text()) | {"max_position_embeddings": 1024}
    config.write_text(json.dumps(longer, indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
