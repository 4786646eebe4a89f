"""Texts that say a passage twice, and texts of two passages: what is gained on the first is gained by comparing.

    python benchmarks/twice.py corpus-valid.jsonl.zst --out twice
    latemask evaluate runs/mlm --suite masked-loss --data twice/repeated.jsonl --out repeated.json
    latemask evaluate runs/mlm --suite masked-loss --data twice/apart.jsonl --out apart.json

Both files hold every passage twice, once first and once second, and differ in what stands beside it: itself, or the
next one. A row holds text after text and is cut where it is full: in rows of 512 tokens, 15 % of them masked, the other
copy of a masked word is there to be read in about half of the cases.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from refusals import program

from latemask import console
from latemask.errors import Refusal
from latemask.text.blocks import Reading
from latemask.text.corpus import read_documents
from latemask.text.files import find
from latemask.writing import write_whole

SEED = 0


@dataclass(frozen=True)
class Options:
    """Write texts that say a passage twice, and texts of two passages."""

    texts: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Files of text, as ``latemask prepare`` takes them."""
    out: Path = Path("twice")
    """Folder for repeated.jsonl and apart.jsonl."""
    words: int = 150
    """Of a passage."""
    every: int = 3000
    """Words from the start of a passage to that of the document's next."""

    def __post_init__(self) -> None:
        if not 1 <= self.words <= self.every:
            raise Refusal("--words, --every", f"{self.words}, {self.every}", "1 or more, no more than --every")


def passages(options: Options) -> list[str]:
    """Of every document that goes on behind its passage, in a shuffled order that stays. Raises ``Refusal`` as
    ``latemask prepare`` does, and for fewer than two."""
    reading, found = Reading(), []
    for document in read_documents(find(options.texts, reading), reading):
        words = document.text.split()
        starts = range(0, len(words) - options.words, options.every)
        found += [" ".join(words[start : start + options.words]) for start in starts]
    if len(found) < 2:
        raise Refusal(" ".join(options.texts), f"passages of {options.words:,} words: {len(found)}", "two or more")
    random.Random(SEED).shuffle(found)
    return found


def write(options: Options) -> None:
    found = passages(options)
    beside = {"repeated": found, "apart": [*found[1:], found[0]]}
    for name, others in beside.items():
        lines = [json.dumps({"text": f"{one}\n\n{other}"}) for one, other in zip(found, others, strict=True)]
        write_whole(options.out / f"{name}.jsonl", "".join(f"{line}\n" for line in lines))
    console.say(f"{len(found):,} texts in each of {options.out}/repeated.jsonl and {options.out}/apart.jsonl")


def main() -> None:
    write(tyro.cli(Options, description=Options.__doc__))


if __name__ == "__main__":
    program(main)
