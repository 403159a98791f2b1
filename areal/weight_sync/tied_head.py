"""Which weight is the LM head of a model whose head is tied to the embedding?

For inference servers that hold the head as a weight of its own. Apart from hf_folder.py because
workers of such servers import it: it needs the standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterable

LM_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"


def embedding_for_head(names: Iterable[str], *, where: str) -> str:
    """The embedding's name. ValueError if there is none, or several."""
    found = [name for name in names if name.endswith(_EMBEDDING)]
    if len(found) != 1:
        raise ValueError(
            f"{where}: expected one weight named *{_EMBEDDING} to make {LM_HEAD} of, got {found}"
        )
    return found[0]
