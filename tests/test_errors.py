"""One form for what a user gave and cannot be used, across processes too."""

from __future__ import annotations

import pickle

from latemask.errors import Refusal
from latemask.training.loop import Diverged


def test_a_refusal_says_where_found_wanted_and_what_to_do():
    assert str(Refusal("a.txt:3", "0xFF", "UTF-8", "Try --invalid replace")) == (
        "a.txt:3: found 0xFF; wanted UTF-8. Try --invalid replace"
    )
    assert str(Refusal("a.txt", "nothing", "text")) == "a.txt: found nothing; wanted text"


def test_a_refusal_crosses_processes_whole():
    for kind in (Refusal, Diverged):
        refusal = kind("a.txt:3", "0xFF", "UTF-8", "Try --invalid replace")
        copy = pickle.loads(pickle.dumps(refusal))
        assert type(copy) is kind
        assert vars(copy) == vars(refusal)
        assert str(copy) == str(refusal)
