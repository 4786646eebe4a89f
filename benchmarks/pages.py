"""The pages under results/evidence, made anew from the JSON beside them: which runs each shows, and in which order.

    python benchmarks/pages.py
    python benchmarks/pages.py --only three-ml masks

A page is what `latemask report` makes of these folders, as Markdown and figures; its HTML is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tyro
from alone import alone, read_costs
from refusals import program
from studies import MLM_RATES

from latemask import console
from latemask.errors import Refusal
from latemask.report.folders import left_out_of, read_folders
from latemask.report.page import write_report
from latemask.report.price import Cost
from latemask.training.journal import JOURNAL


@dataclass(frozen=True)
class Page:
    """``runs`` as seen from its folder, in the order of the page."""

    runs: str
    title: str = "Pretraining runs"
    cost: Cost = "seconds"
    costs: str = ""
    """JSON of joins.py, as seen from its folder: runs that shared their card have the seconds of an update alone."""

    @property
    def places(self) -> list[str]:
        return self.runs.split()


WAYS = ("mlm mask_in_encoder decoder_resets_mask random_replace mae_lm misaligned_positions no_relative "
        "decoder_self_cross decoder_causal_cross decoder_cross")  # fmt: skip
SYSTEMS = ("mlm", "mae_lm", "three_ml_self", "three_ml")
MOST_TUNED = ("128x128,rate=2e-4", "128x512,rate=4e-4", "32x512,masked=.3,rate=2e-4", "32x512,rate=2e-4",
              "32x512,rate=4e-4", "64x512,rate=4e-4")  # fmt: skip
TUNED = {
    "mlm": MOST_TUNED,
    "mae_lm": ("128x512,rate=4e-4", "32x512,rate=2e-4", "32x512,rate=4e-4", "64x512,rate=4e-4"),
    "roberta": MOST_TUNED,
}
JOINS = ("k=0", "k=3", "k=6", "k=9", "self", "cross")
TIMED = ("k=0,rate=0.3", "k=0,rate=0.5", "k=3,rate=0.5", "k=6,rate=0.3", "k=6,rate=0.5", "k=9,rate=0.15",
         "k=9,rate=0.3", "k=9,rate=0.4", "k=9,rate=0.5", "k=9,rate=0.6", "self,rate=0.3", "self,rate=0.5",
         "cross,rate=0.5")  # fmt: skip
PAGES: Mapping[str, Page] = {
    "objectives": Page(" ".join(f"{system},seed={seed}" for seed in (2, 3, 4) for system in SYSTEMS)
                       + " mlm,seed=1 mae_lm,seed=1"),
    "three-ml-base": Page("../objectives/mlm,seed=3 k=0,rate=0.3,seed=3 ../objectives/three_ml,seed=3 "
                          "k=9,rate=0.3,seed=3"),
    "squad": Page("mlm,seed=3 mae_lm,seed=3 ../equal-seconds/mae_lm,seconds=355,seed=3 three_ml,seed=3 mlm,seed=4 "
                  "../equal-seconds/mae_lm,seconds=355,seed=4"),
    "equal-seconds": Page(" ".join(f"../objectives/mlm,seed={seed} ../objectives/mae_lm,seed={seed} "
                                   f"mae_lm,seconds=355,seed={seed}" for seed in (3, 4)),
                          "MAE-LM in MLM's seconds"),
    "short-warm-up": Page("../equal-seconds/mae_lm,seconds=355,seed=4 mae_lm,seconds=355,seed=4 "
                          "half-corpus/mae_lm,seconds=355,seed=4",
                          "MAE-LM in MLM's seconds, a warm-up of .36; of .3; of .3, on half of the corpus"),
    "checkpoints": Page("mlm,seed=4 mae_lm,seed=4 three_ml_self,seed=4 three_ml,seed=4 roberta,seed=4",
                        "On the way, by FLOPs: the runs shared their cards, and their seconds say little", "flops"),
    "time": Page("roberta three_ml_self ../objectives/mlm,seed=2 ../objectives/mae_lm,seed=2 "
                 "../objectives/three_ml_self,seed=2",
                 "Time to quality: transformers' RoBERTa beside ours, base size, 250 M tokens"),
    "three-ml": Page(" ".join(["../masks/mlm", *(f"{join},rate={rate}" for join in JOINS for rate in sorted(MLM_RATES)
                                                 if (join, rate) != ("k=0", 0.15))]),
                     "3ML's joins and rates, by FLOPs: the runs shared their cards, and their seconds say little",
                     "flops"),
    "three-ml-seconds": Page(" ".join(["../masks/mlm", *(f"../three-ml/{trial}" for trial in TIMED)]),
                             "3ML's joins and rates, by the seconds that each would take alone on the card",
                             costs="../../joins_small.json"),
    "masks": Page(WAYS),
    "delta": Page("../masks/mae_lm delta=0.25 delta=0.5 delta=0.75 ../masks/mask_in_encoder"),
    "first-trainings": Page("decoder_self_cross ../masks/decoder_self_cross decoder_causal_cross "
                            "../masks/decoder_causal_cross delta=0.25 ../delta/delta=0.25"),
    "masks-4e-4": Page(WAYS),
    "delta-4e-4": Page("../masks-4e-4/mae_lm delta=0.5 ../masks-4e-4/mask_in_encoder"),
    "repeated": Page("first second ../objectives/mlm,seed=4 ../squad/mlm,seed=4"),
    "collapse": Page("mlm,rate=4e-4 mlm,small,rate=4e-4 mlm,small,rate=8e-4 mae_lm,rate=2e-4 mae_lm,centred,rate=2e-4 "
                     "mae_lm,rate=4e-4 mae_lm,centred,rate=4e-4 mae_lm,small,rate=4e-4 roberta,small,rate=4e-4"),
    "tuning": Page(" ".join(f"{system},{trial}" for system, trials in TUNED.items() for trial in trials),
                   "Settings tried at base size, 50 M tokens, one seed"),
    "untuned": Page("mlm,seed=1 mae_lm,seed=1",
                    "MAE-LM beside MLM at base size, one seed, rate not tuned"),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Make the pages of the evidence anew."""

    evidence: Path = Path("results/evidence")
    """Folder of the folders that have a page each."""
    only: tuple[str, ...] = ()
    """Folders; none given: all."""

    def __post_init__(self) -> None:
        if unknown := set(self.only) - set(PAGES):
            raise Refusal("--only", ", ".join(sorted(unknown)), f"some of: {' '.join(PAGES)}")
        for name in self.only or PAGES:
            for place in PAGES[name].places:
                if not (self.evidence / name / place / JOURNAL).is_file():
                    raise Refusal(self.evidence / name / place, f"no {JOURNAL}", f"a run of the page {name}")
            if (costs := PAGES[name].costs) and not (self.evidence / name / costs).is_file():
                raise Refusal(self.evidence / name / costs, "no such file", f"JSON of joins.py for the page {name}")


def make(folder: Path, page: Page) -> None:
    """Write a folder's page and figures, and take away figures of before that are not made any more. Raises ``Refusal``
    before anything is written for what a page would leave out."""
    folders = read_folders([folder / place for place in page.places])
    if page.costs:
        costs, _ = read_costs([folder / page.costs])
        folders = [alone(one, costs) for one in folders]
    if problems := left_out_of(folders):
        raise problems[0]
    before = set(folder.glob("report.*.svg"))
    made = write_report(folders, folder / "report.html", page.title, page.cost)
    for path in (folder / "report.html", *(before - set(made))):
        path.unlink()


def write(options: Options) -> None:
    for name in options.only or PAGES:
        make(options.evidence / name, PAGES[name])
        console.say(f"{options.evidence / name / 'report.md'}")


def main() -> None:
    write(tyro.cli(Options, description=Options.__doc__))


if __name__ == "__main__":
    program(main)
