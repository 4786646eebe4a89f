"""``latemask pretrain``: a recipe, its overrides and two folders, handed to the loop; or a run folder, gone on with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from latemask import console
from latemask.cli.options import parse_recipe, parse_run
from latemask.cli.preempted import exit_on_sigterm
from latemask.config import Run
from latemask.errors import Refusal
from latemask.training.beginning import refuse_early
from latemask.workers import PREEMPTED


@dataclass(frozen=True)
class PretrainOptions:
    """Pretrain an encoder: `latemask pretrain RECIPE --data DATA --out FOLDER`, or go on: `--resume FOLDER`.

    RECIPE is a name from `latemask recipes`; `latemask pretrain RECIPE --help` lists every field of the recipe.
    """

    data: Path | None = None
    """Folder of prepared text (`latemask prepare`)."""
    out: Path | None = None
    """Run folder: journal and checkpoints."""
    resume: Path | None = None
    """Go on from the newest whole checkpoint of this run folder; on any number of processes."""
    resume_if_present: bool = False
    """Start, or go on where --out holds a checkpoint: one command for a job that may be killed and queued again."""
    overwrite: bool = False
    """Replace the run that --out holds."""
    tracker: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Send the journal there too (extras `tensorboard`, `wandb`)."""


def run_pretrain(arguments: Sequence[str]) -> int:
    """Pretrain; the exit status: 0, ``PREEMPTED`` after SIGTERM (saved, to be resumed), 1 where it stopped on the
    plateau of word frequencies."""
    exit_on_sigterm()
    options, run = read(arguments)
    out = options.resume or options.out
    assert out is not None
    resume = "always" if options.resume else "if-present" if options.resume_if_present else "never"
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        refuse_early(run, options.data, out, resume, options.overwrite)
    from latemask.training import loop

    outcome = loop.pretrain(run, options.data, out, resume=resume, overwrite=options.overwrite,
                            trackers=options.tracker)  # fmt: skip
    leads = os.environ.get("RANK", "0") == "0"
    if outcome.reason == "signal":
        if leads:
            console.say(f"Saved {outcome.step}. Go on with: latemask pretrain --resume {out}")
        return PREEMPTED
    if outcome.reason == "plateau":
        if leads:
            console.say(f"Stopped at {outcome.step}, as --training.stops-on-plateau says. Go on all the same with: "
                        f"latemask pretrain --resume {out}")  # fmt: skip
        return 1
    if leads and outcome.word_frequencies_only:
        console.say(f"Encoder in {outcome.step}, no better than word frequencies: nothing to export. The run's warning "
                    "says what to start again with")  # fmt: skip
    elif leads:
        console.say(f"Encoder in {outcome.step}. Next: latemask export {out} --out {out}/export")
    return 0


def read(arguments: Sequence[str]) -> tuple[PretrainOptions, Run | None]:
    """Options and the run; None where a run folder's own settings go on unchanged. Raises ``Refusal``."""
    folder = _resumed_folder(arguments)
    if folder is None or not arguments[0].startswith("-"):
        wanted = "RECIPE --data DATA --out FOLDER, or --resume FOLDER"
        options, run = parse_recipe(PretrainOptions, arguments, command="pretrain", wanted=wanted)
        _check_resumed(options)
        if options.resume is None and (options.out is None or options.data is None):
            missing = "--out" if options.out is None else "--data"
            raise Refusal(missing, "nothing", "a folder", f"latemask pretrain {arguments[0]} --data DATA --out FOLDER")
        return options, run
    saved = _saved_run(folder)
    options, run = parse_run(PretrainOptions, saved, arguments, prog="latemask pretrain")
    _check_resumed(options)
    return options, None if run == saved else run


def _check_resumed(options: PretrainOptions) -> None:
    if options.resume is not None and options.out is not None:
        raise Refusal("--resume", "--out too", "one of them", "--resume FOLDER goes on in that folder")


def _resumed_folder(arguments: Sequence[str]) -> Path | None:
    """The value of ``--resume``: the run's settings are needed before its flags can be read."""
    for place, argument in enumerate(arguments):
        if argument == "--resume" and place + 1 < len(arguments):
            return Path(arguments[place + 1])
        if argument.startswith("--resume="):
            return Path(argument.removeprefix("--resume="))
    return None


def _saved_run(folder: Path) -> Run:
    """That of the checkpoint which the run goes on from."""
    from latemask.training import checkpoint

    return checkpoint.read_run(checkpoint.newest(folder))
