"""What sentence-transformers reads beside an exported encoder: the mean over all tokens, as ``latemask.encode`` has it.

Three small files in the form that every release since 2.0 reads; without them it makes up the same and warns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from latemask.config import Shape

MODULES, TRANSFORMER, POOLING = "modules.json", "sentence_bert_config.json", "1_Pooling"


def write_sentence(folder: Path, shape: Shape) -> None:
    """Write ``modules.json``, ``sentence_bert_config.json`` and ``1_Pooling/config.json`` into an export."""
    kinds = (("", "Transformer"), (POOLING, "Pooling"))
    modules = [{"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for number, (path, kind) in enumerate(kinds)]  # fmt: skip
    others = dict.fromkeys(("cls_token", "max_tokens", "mean_sqrt_len_tokens"), False)
    pooling = {"word_embedding_dimension": shape.width,
               **{f"pooling_mode_{name}": on for name, on in {"mean_tokens": True, **others}.items()}}  # fmt: skip
    (folder / POOLING).mkdir()
    _write(folder / MODULES, modules)
    _write(folder / TRANSFORMER, {"max_seq_length": shape.row_tokens, "do_lower_case": False})
    _write(folder / POOLING / "config.json", pooling)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
