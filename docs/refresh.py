"""Brings everything that is computed up to date: the figure, results/costs.json, the README's cost table and tree, the
tables of docs/recipes.md.

Run it with ``python docs/refresh.py``; tests hold the results to what is computed.
"""

from __future__ import annotations

import re
from pathlib import Path

import costs
import idea
import rows
import tree

README = Path(__file__).parents[1] / "README.md"


def sections() -> dict[str, str]:
    """What stands between the README's markers, by their name."""
    return {"costs": costs.markdown(costs.costs()), "tree": f"```\n{tree.tree()}```\n"}


def refreshed(text: str, contents: dict[str, str]) -> str:
    """``text`` with what stands between ``<!-- name -->`` and ``<!-- /name -->`` replaced."""
    for name, content in contents.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = pattern.sub(lambda match, content=content: match[1] + content + match[2], text)
    return text


if __name__ == "__main__":
    idea.write()
    costs.write()
    for path, contents in ((README, sections()), (rows.RECIPES, rows.sections())):
        path.write_text(refreshed(path.read_text(encoding="utf-8"), contents), encoding="utf-8")
