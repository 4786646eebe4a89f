"""The README's tree: one line a file, taken from the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "latemask"
LONGEST = 100


def tree() -> str:
    """Files of the package, folders after the files beside them."""
    return "\n".join(["src/latemask/", *lines(PACKAGE, "  ")]) + "\n"


def lines(folder: Path, indent: str) -> list[str]:
    """One line for each file that says what it is, then the folders."""
    found = []
    for path in sorted(folder.glob("*.py")):
        if summary := first_sentence(path):
            found.append(f"{indent}{path.name:<{28 - len(indent)}}{summary}")
    for path in sorted(folder.iterdir()):
        if path.is_dir() and (path / "__init__.py").is_file():
            found += [f"{indent}{path.name}/", *lines(path, indent + "  ")]
    return found


def first_sentence(path: Path) -> str:
    """The docstring's first sentence, cut at a word; empty where there is none."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    sentence = re.split(r"[.;](?:\s|$)", text.replace("``", ""), maxsplit=1)[0].rstrip(":")
    if len(sentence) <= LONGEST:
        return sentence
    return sentence[:LONGEST].rpartition(" ")[0].rstrip(",") + " ..."
