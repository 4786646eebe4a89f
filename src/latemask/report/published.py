"""Numbers that the papers print, for the rows of our tables that are labelled so."""

from __future__ import annotations

import dataclasses

from latemask.config import Run
from latemask.recipes import recipe

TABLE_1: dict[str, dict[str, str]] = {
    "RoBERTa (Ours), base, published": {
        "mnli": "85.9/85.8", "qqp": "91.6", "qnli": "92.3", "sst2": "93.7", "cola": "64.3", "rte": "75.5",
        "mrpc": "88.7", "stsb": "89.5", "AVG": "85.2", "EM": "78.3", "F1": "81.5",
    },
    "MAE-LM, base, published": {
        "mnli": "87.2/87.1", "qqp": "91.6", "qnli": "92.9", "sst2": "93.8", "cola": "63.1", "rte": "79.1",
        "mrpc": "90.2", "stsb": "90.9", "AVG": "86.1", "EM": "81.1", "F1": "84.1",
    },
}  # fmt: skip
"""MAE-LM Table 1, base setting: 12 x 768, 16 GB of text; medians of five seeds on the development sets."""

TABLE_3: dict[str, dict[str, int]] = {
    "RoBERTa (Ours), base, published": {"pretrained": 462, "mnli": 149, "squad2": 103},
    "MAE-LM, base, published": {"pretrained": 491, "mnli": 211, "squad2": 260},
}
"""MAE-LM Table 3: rank_.9 of the last layer's real tokens, of 768 dimensions."""

COMPUTE_SHARE = {"three_ml_self_base": 0.78, "three_ml_self_large": 0.68}
"""3ML's abstract: the self variant's share of RoBERTa's compute budget; how that was counted is not known."""


def compute_share(run: Run) -> float | None:
    """``COMPUTE_SHARE`` of the recipe that ``run`` is, whatever its name, tokenizer and training; None where shape,
    decoder or masking are no recipe's of these."""
    for name, share in COMPUTE_SHARE.items():
        own = recipe(name)
        shape = dataclasses.replace(own.shape, vocabulary=run.shape.vocabulary, specials=run.shape.specials)
        if (run.shape, run.decoder, run.masking) == (shape, own.decoder, own.masking):
            return share
    return None
