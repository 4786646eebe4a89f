"""``latemask doctor``: what this machine has, and whether a tiny run's forward and backward pass is right on it; or
whether prepared text is what was written."""

from __future__ import annotations

import time
from dataclasses import dataclass

from latemask import console
from latemask.errors import Refusal
from latemask.text.store import open_store


@dataclass(frozen=True)
class DoctorOptions:
    """Card, versions, kernels in use, and a short self-test; or, with --data, a check of prepared text."""

    data: str = ""
    """Folder of prepared text (`latemask prepare`): compare every byte of it with its checksum, and nothing else."""


def run_doctor(options: DoctorOptions) -> None:
    """Print the tables of ``latemask doctor``, or check prepared text. Raises ``Refusal`` where a check fails."""
    if options.data:
        check_data(options.data)
        return
    from latemask.cli.self_test import kernels, machine, self_test
    from latemask.training.distributed import pick_device

    device = pick_device()
    console.table("Machine", ("what", "found"), machine(device))
    console.table("Kernels that a run takes here", ("kernel", "used", "why, and what runs instead"), kernels(device))
    checks = self_test(device)
    title = "Self-test: MLM, MAE-LM, and 3ML with rotary positions, one forward and backward pass each"
    console.table(title, ("check", "found", "wanted", ""),
                  [(c.name, c.found, c.wanted, "ok" if c.holds else "FAILED") for c in checks])  # fmt: skip
    if failed := [check for check in checks if not check.holds]:
        raise Refusal("doctor", f"{failed[0].name}: {failed[0].found}", failed[0].wanted,
                      "Try another torch build, and report this table with it")  # fmt: skip
    console.say("All is well.")


def check_data(folder: str) -> None:
    """Read prepared text to its end, and say that it is whole. Raises ``Refusal`` naming each place that is not."""
    store = open_store(folder)
    size, begun = store.bytes_on_disk / 1e6, time.monotonic()
    with console.progress("checking", size, "MB") as advance:
        store.check(lambda read: advance(read / 1e6))
    seconds = time.monotonic() - begun
    train, valid = len(store.train.tokens), len(store.valid.tokens)
    console.say(f"{folder}: {size:,.1f} MB, {train:,} tokens to train on and {valid:,} held out, all as they were "
                f"written ({seconds:,.1f} s)")  # fmt: skip
