"""docs/recipes.md: every row of both papers, and ours, as one command, with the paper's number and what it costs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import NamedTuple

from latemask.cli.cost import CostOptions
from latemask.cli.options import parse_run
from latemask.config import Run, replace
from latemask.recipes import recipe
from latemask.study.cost import cost

RECIPES = Path(__file__).with_name("recipes.md")
PROFILE = Path(__file__).parents[1] / "results" / "profile_h100.json"
CARD, MFU = "H100", 0.4


class Row(NamedTuple):
    """One row: ``flags`` change fields of the recipe; a ``vary`` makes it a sweep."""

    what: str
    system: str
    number: str = ""
    """What the paper reports, base size: the GLUE average unless it says otherwise."""
    flags: str = ""
    vary: str = ""

    def command(self, size: str = "base") -> str:
        """As it is typed, but for data and out."""
        verb = "sweep" if self.vary else "pretrain"
        vary = f"--vary {shlex.quote(self.vary)}" if self.vary else ""
        return " ".join(filter(None, ["latemask", verb, f"{self.system}_{size}", vary, self.flags]))

    def runs(self, size: str = "base") -> list[Run]:
        """The run, or every run of the sweep."""
        name = f"{self.system}_{size}"
        _, run = parse_run(CostOptions, recipe(name), shlex.split(self.flags), prog=name)
        field, _, values = self.vary.partition("=")
        return [replace(run, {field: float(value)}) for value in values.split(",")] if self.vary else [run]


TABLES: dict[str, tuple[Row, ...]] = {
    "MAE-LM Tables 1 and 2": (
        Row("MAE-LM", "mae_lm", "86.1"),
        Row("enc. w. [MASK], no dec. (MLM)", "mlm", "85.2"),
        Row("enc. w. [MASK]", "mask_in_encoder", "85.1"),
        Row("enc. w. [MASK], dec. resets [MASK]", "decoder_resets_mask", "85.9"),
        Row("random replace w. real token", "random_replace", "85.1"),
        Row("misaligned position encoding", "misaligned_positions", "86.0"),
        Row("no relative position encoding", "no_relative", "86.1"),
        Row("bi. self-attention + cross-attention", "decoder_self_cross", "85.4"),
        Row("uni. self-attention + cross-attention (like BART)", "decoder_causal_cross", "85.5"),
        Row("cross-attention", "decoder_cross", "86.0"),
        Row("2 layer, 768 dimension", "decoder_2_layers", "85.8"),
        Row("6 layer, 768 dimension", "decoder_6_layers", "84.8"),
        Row("4 layer, 512 dimension", "decoder_512_wide", "85.8"),
        Row("4 layer, 1024 dimension", "decoder_1024_wide", "85.5"),
        Row("BERT's 80/10/10 (not in the paper's runs)", "mlm_80_10_10"),
    ),
    "MAE-LM Figure 4": (
        Row("the share delta of [MASK] enters the encoder", "delta", "falls from 86.1 at 0 to about 85.2 at 1",
            vary="masking.delta=0,.25,.5,.75,1"),
    ),
    "3ML": (
        Row("[MASK]s appended at a later layer", "three_ml"),
        Row("at any layer k, here 6", "three_ml", flags="--masking.joins 6"),
        Row("small decoder, self-attention", "three_ml_self", "RoBERTa's GLUE at 78 % of its compute (large: 68 %)"),
        Row("small decoder, self- and cross-attention", "three_ml_cross"),
        Row("rate from 15 % to 50 % and beyond", "three_ml_self", vary="masking.rate=.15,.3,.4,.5,.6,.7"),
        Row("the mask vector apart from the word embedding (3ML's own setting; here for MAE-LM)", "mae_lm",
            flags="--masking.vector own"),
        Row("the same vector as the word embedding's", "three_ml_self", flags="--masking.vector token"),
        Row("random tokens kept in the encoder", "three_ml_random_kept"),
    ),
    "Ours": (
        Row("gradual arrival over several layers", "gradual"),
        Row("cross-only decoder on the predicted positions alone, half of the tokens masked", "decoder_cross",
            flags="--masking.rate .5"),
        Row("rate falling from 50 to 15 % in five steps", "falling_rate"),
        Row("any other schedule", "mae_lm", flags="--masking.rate .5 --masking.later-rates .5:.3 .8:.1"),
        Row("three tenths of the masked positions predicted", "predict_subset"),
        Row("any other share", "mlm", flags="--masking.rate .4 --masking.predicted-share .375"),
    ),
}  # fmt: skip


def table(rows: tuple[Row, ...]) -> str:
    """Rows with the computed cost at base size; of a sweep, from the cheapest to the dearest."""
    lines = [f"| row | command | paper | FLOPs beside MLM: plain (as run here) | {CARD}-hours |",
             "| --- | --- | --- | ---: | ---: |"]  # fmt: skip
    for row in rows:
        found = [cost(run, kind=CARD, cards=1, mfu=MFU) for run in row.runs()]
        plain, executed = (_span([getattr(one, name) for one in found], "{:.0%}")
                           for name in ("plain_ratio", "executed_ratio"))  # fmt: skip
        hours = _span([one.gpu_hours for one in found], "{:.0f}")
        lines.append(f"| {row.what} | `{row.command()}` | {row.number} | {plain} ({executed}) | {hours} |")
    return "\n".join(lines) + "\n"


def measured() -> str:
    """What share of the card's peak real steps reached."""
    steps = json.loads(PROFILE.read_text(encoding="utf-8"))["steps"]
    wanted = ("the same, doors compiled too: as committed", "mae_lm_base, absolute positions, dropout .1",
              "mae_lm_base as in the paper (relative bias, dropout .1), tiles not yet tuned")  # fmt: skip
    mlm, mae, paper = (next(step["mfu_plain"] for step in steps if step["what"] == what) for what in wanted)
    hours, then = (cost(recipe("mae_lm_base"), mfu=share).gpu_hours for share in (MFU, paper))
    return (
        f"Measured full steps on one H100 (`results/profile_h100.json`) reach {mlm:.0%} of the peak for `mlm_base`\n"
        f"with absolute positions and no dropout, {mae:.0%} for `mae_lm_base` with absolute positions and dropout .1,\n"
        f"and {paper:.0%} for `mae_lm_base` as in the paper: its {hours:.0f} hours at 40% are then {then:.0f}.\n"
    )


def sections() -> dict[str, str]:
    """What stands between the markers of docs/recipes.md."""
    tables = "\n".join(f"### {name}\n\n{table(rows)}" for name, rows in TABLES.items())
    return {"rows": tables, "measured": measured()}


def _span(values: list[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"
