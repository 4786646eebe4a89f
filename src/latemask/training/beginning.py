"""What can be refused of a run before anything of it is built: flags, folder and data. No torch."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

from latemask.config import Run
from latemask.counts import parameters
from latemask.errors import Refusal
from latemask.text.store import SUMMARY, TokenStore, open_store
from latemask.training import checkpoint
from latemask.training.checkpoint import State
from latemask.training.journal import JOURNAL
from latemask.training.resuming import refuse_another_run
from latemask.writing import check_folder

Resume = Literal["never", "if-present", "always"]
A_RUN = "a run already"


def refuse_early(run: Run | None, data: Path | str | None, out: Path, resume: Resume, overwrite: bool) -> None:
    """Raise ``Refusal`` as ``pretrain`` would, where that needs no torch; nothing is written. For one process alone:
    of several the first may have begun while another still looks."""
    refuse_flags(out, resume, overwrite)
    check_folder(out)
    held = occupied(out)
    if goes_on(held, resume):
        if (step := checkpoint.last_described(out)) is not None:
            continued(run, data, out, step)
    else:
        refuse_occupied(out, held, resume, overwrite)
        fitted(run, data)


def refuse_flags(out: Path, resume: Resume, overwrite: bool) -> None:
    """Raise ``Refusal`` for flags that contradict each other, or ask to go on with nothing."""
    if overwrite and resume != "never":
        raise Refusal("--overwrite", "--resume or --resume-if-present too", "one of them",
                      "--resume goes on with a run, --overwrite begins anew")  # fmt: skip
    if resume == "always" and not out.is_dir():
        raise Refusal(out, "no such folder", "the folder of a run")


def occupied(out: Path) -> str:
    """What a run folder holds besides what a run leaves before its first checkpoint; empty: nothing."""
    if checkpoint.steps(out):
        return A_RUN
    inside = out.iterdir() if out.is_dir() else ()
    others = sorted(path.name for path in inside if path.name[0] != "." and path.name != JOURNAL)
    return f"other files ({', '.join(others[:5])})" if others else ""


def goes_on(held: str, resume: Resume) -> bool:
    """Whether the run in a folder that holds ``held`` goes on."""
    return resume == "always" or (resume == "if-present" and held == A_RUN)


def refuse_occupied(out: Path, held: str, resume: Resume, overwrite: bool) -> None:
    """Raise ``Refusal`` where a new run would hide what the folder holds."""
    if held == A_RUN and not overwrite:
        raise Refusal(out, held, "an empty folder", "Resume it with --resume, or pass --overwrite")
    if held not in ("", A_RUN) and resume == "never":
        raise Refusal(out, held, "an empty folder, or with --overwrite a run's", "Take another --out")


def fitted(run: Run | None, data: Path | str | None) -> tuple[Run, TokenStore]:
    """The run on its data, and the data. Raises ``Refusal`` where one is missing or too large, or they do not fit."""
    if run is None or data is None:
        raise Refusal("pretrain", "no recipe or no data", "RECIPE --data DATA --out FOLDER, or a run to resume")
    store = open_store(Path(data))
    run = store.fitted(run)
    numbers, room = parameters(run).total, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * numbers > room:
        size = f"{numbers:.3g} parameters of {run.recipe}, {4 * numbers / 1e9:.3g} GB"
        raise Refusal("shape, decoder", size, f"at most this machine's memory, {room / 1e9:,.0f} GB")
    return run, store


def continued(run: Run | None, data: Path | str | None, out: Path, step: Path) -> tuple[Run, Run, TokenStore, State]:
    """The run of ``step`` as it was and as it goes on, its data, and where it stands. Raises ``Refusal`` for other data
    than it began with, and for settings that would make it another run."""
    before, state = checkpoint.read_run(step), checkpoint.read_state(step)
    if data is None and not (Path(state.data) / SUMMARY).is_file():
        raise Refusal(state.data, f"no {SUMMARY}", f"the data that {step} was trained on",
                      "Where they lie elsewhere now: --data FOLDER")  # fmt: skip
    store = open_store(Path(state.data if data is None else data))
    if store.fingerprint != state.data_fingerprint:
        raise Refusal(store.folder, "other tokens or another tokenizer", f"the data that {step} was trained on")
    now = before
    if run is not None:
        run = store.fitted(run)
        refuse_another_run(out, before, run)
        now = dataclasses.replace(before, training=run.training)
    return before, now, store, dataclasses.replace(state, data=str(store.folder.resolve()))
