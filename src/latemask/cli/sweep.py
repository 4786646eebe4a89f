"""``latemask sweep``: one recipe at several values of a field, or of several fields (their product), run after run.

The folder is the queue, as in fine-tuning: a run that is done has ``NAME.json`` beside its folder ``NAME/``, one that
somebody is at has a claim. So a stopped sweep goes on where it stood, and several processes (one a card) can share it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import re
import shlex
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from tyro.conf import UseAppendAction

from latemask import console
from latemask.cli.options import FROM_DATA, MOST_NAMED, parse_recipe
from latemask.cli.preempted import exit_on_sigterm
from latemask.config import Run, replace
from latemask.errors import Refusal, unreadable
from latemask.fields import Spelled, typed
from latemask.recipes import of_the_size, recipe
from latemask.workers import PREEMPTED
from latemask.writing import alone_at, check_folder, make_folder, write_json, write_whole

MOST_RUNS = 1000
ONE_RATE = "--training.validation-rate 0.15"


@dataclass(frozen=True)
class SweepOptions:
    """Pretrain a recipe once for each value of a field: `latemask sweep RECIPE --vary FIELD=A,B,C --data DATA --out
    FOLDER`, with the flags of `latemask pretrain RECIPE --help` for everything else.

    Runs that are done are passed over and a stopped one goes on: the same command again. Started on several cards (one
    process each, CUDA_VISIBLE_DEVICES=0 and so on) with the same --out, the processes share the runs.
    """

    vary: UseAppendAction[tuple[str, ...]]
    """A field and its values, as in masking.delta=0,.25,.5,.75,1. Several --vary: every combination. A field of several
    values takes them with spaces: "masking.joins=0,decoder,0:0:0.2 decoder:0.2:1"; none stands for no value."""
    data: Path
    """Folder of prepared text (`latemask prepare`)."""
    out: Path
    """Folder of the sweep: a run folder for each combination."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    """Of its folder: the varied fields and their values."""
    run: Run


def run_sweep(arguments: Sequence[str]) -> int:
    """What ``latemask sweep`` does; the exit status as of ``latemask pretrain``."""
    exit_on_sigterm()
    wanted = "RECIPE --vary FIELD=VALUES --data DATA --out FOLDER"
    options, run = parse_recipe(SweepOptions, arguments, command="sweep", wanted=wanted,
                                takes="one RECIPE, a --vary for each field, and flags")  # fmt: skip
    return sweep(run, options.vary, options.data, options.out)


def sweep(run: Run, vary: Sequence[str], data: Path, out: Path) -> int:
    """Run every point that is not done and not somebody else's, then show all of them; the exit status, PREEMPTED also
    where others are still at some.

    Raises ``Refusal`` before the first run for fields, values, data or an ``out`` that cannot be used.
    """
    from latemask.downstream.claims import claimed, is_done, who_is_at
    from latemask.text.store import open_store

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Refusal("sweep", "several processes for one run (torchrun)", "one process for each card",
                      "Start the command once a card with its CUDA_VISIBLE_DEVICES; they share --out")  # fmt: skip
    store = open_store(data)
    fitted = store.fitted(run)
    values = read_vary(fitted, vary)
    found = points(fitted, values)
    text = [store.tokenizer_fingerprint, len(store.train.tokens), len(store.valid.tokens)]
    check_folder(out)
    _check(out, fitted, values, found, text)
    _note_down(out, run.recipe, values)
    console.say(f"{len(found)} runs of {run.recipe} in {out}")
    _warn_of_losses([point.run for point in found])
    for number, point in enumerate(found, 1):
        with claimed(out, point.name) as is_ours:
            if not is_ours:
                somebody = who_is_at(out, point.name) or "another process"
                why = "done" if is_done(out, point.name) else f"{somebody} is at it"
                console.say(f"{number} of {len(found)}, {point.name}: {why}")
                continue
            console.say(f"{number} of {len(found)}, {point.name}")
            result, was_signalled = _train(point.run, data, out / point.name)
            if result["end"] == "signal":
                console.say(f"Stopped. The same command goes on with {out / point.name}.")
                return PREEMPTED
            write_json(out / f"{point.name}.json", {"kind": "sweep-run", **result, "data": text,
                                                    "run": json.loads(point.run.to_json())})  # fmt: skip
            if was_signalled:
                console.say(f"Stopped after {point.name}. The same command goes on.")
                return PREEMPTED
    missing = sum(not is_done(out, point.name) for point in found)
    if missing < len(found):
        finish(out)
    if missing:
        console.say(f"{missing} of {len(found)} runs are others' and not done. The same command goes on.")
        return PREEMPTED
    return 0


def read_vary(run: Run, vary: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each varied field, typed. Raises ``Refusal`` naming the field or value that cannot be."""
    found: dict[str, list[Any]] = {}
    for text in vary:
        field, _, listed = text.partition("=")
        field = field.strip().replace("-", "_")
        texts = [value.strip() for value in listed.split(",")]
        if not field or not all(texts):
            raise Refusal("--vary", repr(text), "FIELD=VALUE,VALUE,...")
        if field in found:
            raise Refusal("--vary", f"{field} twice", "all of its values in one --vary")
        if field.partition(".")[2] in FROM_DATA:
            raise Refusal("--vary", field, "a field that the data do not set")
        try:
            found[field] = [_value(run, field, value) for value in texts]
        except Refusal as refusal:
            raise Refusal(refusal.where, refusal.found, refusal.wanted,
                          _with_recipes(refusal.do, run, field, texts)) from None  # fmt: skip
        if len({repr(value) for value in found[field]}) < len(texts):
            raise Refusal("--vary", f"a value of {field} twice", "different values")
    if not found:
        raise Refusal("--vary", "nothing", "FIELD=VALUE,VALUE,...")
    return found


def points(run: Run, values: dict[str, list[Any]]) -> list[Point]:
    """Every combination of the values, the last field changing fastest. Raises ``Refusal`` where one breaks a rule."""
    if (count := len(list(itertools.product(*values.values())))) > MOST_RUNS:
        raise Refusal("--vary", f"{count:,} combinations", f"at most {MOST_RUNS:,}")
    found = []
    for chosen in itertools.product(*values.values()):
        changes = dict(zip(values, chosen, strict=True))
        found.append(Point(",".join(f"{field}={_text(value)}" for field, value in changes.items()),
                           replace(run, changes)))  # fmt: skip
    if len({point.name for point in found}) < len(found):
        raise Refusal("--vary", "values whose folders would have one name", "values that differ in ten digits")
    return found


def _value(run: Run, field: str, text: str) -> Any:
    """The value of ``field`` that ``text`` means, as the field has it after ``replace``."""
    part, _, leaf = field.partition(".")
    hints = get_type_hints(type(getattr(run, part, None))) if getattr(run, part, None) is not None else {}
    changed = replace(run, {field: _plain(hints.get(leaf), text)})
    return getattr(getattr(changed, part), leaf)


def _with_recipes(do: str, run: Run, field: str, texts: Sequence[str]) -> str:
    """The advice, and the recipes of the run's size that take all of these values, those most like it first; the advice
    alone where the run's own recipe takes them too, so that other flags are in the way."""
    from latemask.training.resuming import differences

    plain, unlike = json.loads(run.to_json()), {}
    for name in of_the_size(run.recipe):
        other = recipe(name)
        with contextlib.suppress(Refusal):
            for text in texts:
                _value(other, field, text)
            unlike[name] = len(differences(plain, json.loads(other.to_json())))
    if not unlike or run.recipe in unlike:
        return do
    names = ", ".join(sorted(unlike, key=unlike.__getitem__)[:MOST_NAMED])
    return ". ".join(filter(None, [do, f"Recipes that take {', '.join(texts)}: {names}"]))


def _plain(hint: Any, text: str) -> Any:
    """``text`` as JSON would have it; what it cannot be stays text, for ``typed`` to refuse."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if text.lower() == "none":
            return None
        return _plain(next(argument for argument in arguments if argument is not type(None)), text)
    if origin is tuple:
        return [] if text.lower() == "none" else [_plain(arguments[0], word) for word in text.split()]
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    for number in (int, float) if hint in (int, float) else ():
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _text(value: Any) -> str:
    """A value in a folder's name."""
    if isinstance(value, tuple):
        return "+".join(map(_text, value))
    shown = f"{value:.10g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^\w.+-]", "-", shown if isinstance(value, Spelled) else shown.lower())


def _check(out: Path, run: Run, values: dict[str, list[Any]], found: Sequence[Point], text: list[Any]) -> None:
    """Raise ``Refusal`` where ``out`` holds a run that is no point of this sweep, one of ``found`` or of other values:
    one sweep, one set of other settings, but for what makes a run fit its card, and the same data."""
    from latemask.downstream.claims import is_done
    from latemask.training import checkpoint
    from latemask.training.resuming import FITTING, differences, told

    do, planned = "Take another --out", {point.name: point.run for point in found}
    if _holds_run(out):
        raise Refusal(out, "a run itself", "a new folder, or one of this sweep", do)
    inside = [folder.name for folder in sorted(out.iterdir()) if _holds_run(folder)] if out.is_dir() else []
    for name in dict.fromkeys([*planned, *inside]):
        if [part.partition("=")[0] for part in name.split(",")] != list(values):
            raise Refusal(out, f"the run {name}", f"only runs of a sweep over {', '.join(values)}", do)
        file, folder = out / f"{name}.json", out / name
        if is_done(out, name):
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
                done, on = content["run"], content["data"]
            except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
                raise Refusal(file, unreadable(error), "a sweep's result") from None
            if on != text:
                raise Refusal(folder, "a run on other data", "the data of the sweep", do)
            held = typed(Run, done, str(file))
        elif (held := checkpoint.last_run(folder)) is None:
            continue
        differing = differences(*(json.loads(each.to_json()) for each in (held, planned.get(name, run))))
        free = FITTING if name in planned else (*FITTING, *values)
        if other := [one for one in differing if one[0] not in free]:
            wanted, was = told([one for one in other if one[0] == "recipe"] or other)
            raise Refusal(folder, f"a run with {was}", wanted, "Give the same flags, or another --out")


def _warn_of_losses(runs: Sequence[Run]) -> None:
    """Say before the first run that the validation losses will not compare, and what lets them where a flag does."""
    from latemask.report.comparable import differing, of_planned, why_not

    facts = [of_planned(run) for run in runs]
    if why := why_not(facts):
        do = f" Validate all at one rate: {ONE_RATE}" if "rate" in differing(facts) else ""
        console.warn(f"{why}{do}")


def _holds_run(folder: Path) -> bool:
    from latemask.training import checkpoint
    from latemask.training.journal import JOURNAL

    return bool(checkpoint.steps(folder)) or (folder / JOURNAL).is_file()


def _note_down(out: Path, name: str, values: dict[str, list[Any]]) -> None:
    """Write ``sweep.json``, which says what the runs of the folder vary: these values and those that stand there,
    one process at a time."""
    from latemask.report.folders import SWEEP

    texts = {field: [_text(value) for value in listed] for field, listed in values.items()}
    make_folder(out)
    with alone_at(out, out / ".sweep.lock", "noting its values", waits=True):
        if (out / SWEEP).is_file():
            try:
                held = json.loads((out / SWEEP).read_text(encoding="utf-8"))
                recipe_before = held["recipe"]
                before = {field: list(listed) for field, listed in dict(held["vary"]).items()}
            except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
                raise Refusal(out / SWEEP, unreadable(error), "a sweep's own") from None
            if recipe_before != name or list(before) != list(texts):
                found = f"a sweep of {recipe_before} over {', '.join(before)}"
                raise Refusal(out, found, f"one of {name} over {', '.join(texts)}", "Take another --out")
            texts = {field: list(dict.fromkeys([*before[field], *listed])) for field, listed in texts.items()}
        write_json(out / SWEEP, {"kind": "sweep", "recipe": name, "vary": texts})


def _train(run: Run, data: Path, folder: Path) -> tuple[dict[str, Any], bool]:
    """Start the run or go on with it; how it ended, and whether a signal asks to stop here. One that diverges ends
    there: that too is a result."""
    import torch

    from latemask.training.loop import Diverged, pretrain

    torch.compiler.reset()
    try:
        outcome = pretrain(run, data, folder, resume="if-present")
    except Diverged as diverged:
        console.warn(f"diverged: {diverged}")
        return {"end": "diverged"}, False
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the next run measures what is free
    return {"end": outcome.reason, "step": outcome.step.name}, outcome.was_signalled


def finish(out: Path) -> None:
    """Print the sweep's table and the next command, and draw the trends of what is there."""
    from latemask.report.folders import in_order, read_folders
    from latemask.report.material import Material
    from latemask.report.tables import distinct
    from latemask.report.trend import trend_drawings, trend_table

    material = Material.of(read_folders(sorted(filter(_holds_run, out.iterdir()), key=in_order)))
    runs, fields = material.folders, material.folders[0].varied
    table = trend_table(material, fields, runs)
    console.table(table.title, table.columns, table.rows)
    if table.note:
        console.say(table.note)
    drawings = trend_drawings(material, fields, runs)
    for name, drawing in zip(distinct([drawing.name for drawing in drawings]), drawings, strict=True):
        console.say(f"wrote {write_whole(out / f'{name}.svg', drawing.svg)}")
    here = shlex.quote(str(out))
    console.say(f"Next: latemask report {here} --out {here}/report.html")
    each = f'for run in {here}/*/; do latemask finetune "$run" --task glue --data GLUE; done'
    console.say(f"For scores downstream in that report, run this before it: {each}")
