"""Pretraining as one function: take batch ``index``, forward, backward, update, write down, save.

No state hides anywhere: data follows from the batch index, dropout from (seed, batch index, rank), the learning rate
from the number of updates (or rank 0's clock), so a checkpoint is tensors and a few numbers. The host never waits
for the device inside a step: whether an update was skipped is read after the next forward pass was launched.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from latemask.batch import Batch
from latemask.cards import card_of_device
from latemask.config import Run
from latemask.console import warn
from latemask.counts import flops_per_token
from latemask.errors import Refusal
from latemask.feed.masking import DROPOUT, noise
from latemask.feed.prefetch import Prefetch
from latemask.model.pretrainer import Pretrainer
from latemask.out_of_memory import out_of_memory_is_refused
from latemask.training import checkpoint, journal
from latemask.training.beginning import Resume, continued, fitted, goes_on, occupied, refuse_flags, refuse_occupied
from latemask.training.checkpoint import State
from latemask.training.compiler import begun_meanwhile
from latemask.training.data_parallel import dismantle, gathered, reducing
from latemask.training.distributed import World, joined_world
from latemask.training.guards import locked, signals
from latemask.training.micro import rows_are_to_fit
from latemask.training.optimizer import Verdict, optimizer_tensors, update
from latemask.training.parts import Parts, assemble, device_name, facts, memory_bytes
from latemask.training.plateau import Plateau
from latemask.training.resuming import has_the_same_room
from latemask.training.schedules import learning_rate, share_of_updates
from latemask.training.watch import Display, Stopwatch
from latemask.workers import PREEMPTED as PREEMPTED
from latemask.writing import disk_errors_are_refused

Reason = Literal["steps", "seconds", "signal", "plateau"]


@dataclass(frozen=True)
class Outcome:
    """How a call of ``pretrain`` ended."""

    step: Path
    """The last step folder."""
    reason: Reason
    """Why it stopped; "signal" after SIGTERM or Ctrl-C, "plateau" by ``training.stops_on_plateau``."""
    validation_loss: float | None
    """Nats per masked token at the last validation; None where there was none of trained weights."""
    was_signalled: bool = False
    """Whether a signal was heard, perhaps too late to stop the run: what comes after it should not begin."""
    word_frequencies_only: bool = False
    """Whether the last validation after the warm-up was no better than word frequencies (rank 0 alone knows)."""


class Diverged(Refusal):
    """Too many updates in a row had a loss or gradient that is not finite."""


def pretrain(
    run: Run | None,
    data: Path | str | None,
    out: Path | str,
    *,
    resume: Resume = "never",
    overwrite: bool = False,
    trackers: Sequence[journal.Tracker] = (),
) -> Outcome:
    """Pretrain ``run`` on the prepared ``data`` into the run folder ``out``; under torchrun, on every process.

    ``resume``: "always" goes on from the newest whole checkpoint in ``out`` (``run`` and ``data`` may be None: the
    checkpoint says); "if-present" starts where there is none. ``overwrite`` replaces the run that the folder holds.
    SIGTERM and Ctrl-C save and stop: one process before its next micro-batch (what it did of the step is done again by
    the resumed run), several after the step. A validation is broken off, and made by the resumed run.

    Raises ``Refusal`` for settings, data or folders that cannot be used, and ``Diverged`` where training broke down;
    the last good checkpoint stays.

    >>> outcome = latemask.pretrain(latemask.recipe("mae_lm_tiny"), "data/en", "runs/x")  # doctest: +SKIP
    """
    out = Path(out)
    refuse_flags(out, resume, overwrite)
    with joined_world() as world, locked(out, world), out_of_memory_is_refused("pretrain", "choose a smaller recipe"):
        held = world.decide_text(occupied(out) if world.leads else "")
        if goes_on(held, resume):
            return _resumed(run, data, out, world, trackers)
        refuse_occupied(out, held, resume, overwrite)
        run, store = fitted(run, data)
        torch.manual_seed(run.training.seed)
        state = State(data=str(store.folder.resolve()), data_fingerprint=store.fingerprint)
        with begun_meanwhile(run.training, world.device):
            model = Pretrainer(run)
        parts = assemble(run, store, model, {}, None, world)
        if world.leads:
            checkpoint.clear(out)
        with rows_are_to_fit(parts.micro_rows, saved=resume == "never" and not overwrite):
            return _train(parts, state, out, world, is_resumed=False, trackers=trackers)


def _resumed(
    run: Run | None, data: Path | str | None, out: Path, world: World, trackers: Sequence[journal.Tracker]
) -> Outcome:
    step = Path(world.decide_text(str(_newest(out)) if world.leads else ""))
    before, now, store, state = continued(run, data, out, step)
    if state.updates > (wanted := now.updates):
        raise Refusal("training.steps", f"{wanted:,} in all", f"{state.updates:,} or more, where {step} stands",
                      "Nothing was changed")  # fmt: skip
    if ended := json.loads(world.decide_text(json.dumps(_finished(now, state, out)) if world.leads else "")):
        with Display(now, wanted, out, enabled=world.leads) as display:
            display.hear("end", ended)
        return Outcome(step, ended["reason"], ended["loss"], word_frequencies_only=bool(ended["word_frequencies_only"]))
    with begun_meanwhile(now.training, world.device):
        model = checkpoint.read_pretrainer(step)
    micro_rows = state.micro_rows if state.processes == world.size and has_the_same_room(before, now) else None
    parts = assemble(now, store, model, checkpoint.read_optimizer(step), micro_rows, world)
    with rows_are_to_fit(parts.micro_rows):
        return _train(parts, state, out, world, is_resumed=True, trackers=trackers)


def _finished(run: Run, state: State, out: Path) -> dict[str, Any] | None:
    """The journal's line of how the run in ``out`` ended, with its last validation ``loss``, where ``run`` asks for no
    more of it: who goes on with it then changes nothing. None where there is something to do, or to mend."""
    path, most = out / journal.JOURNAL, run.training.max_seconds
    lines, problem = journal.salvaged(path) if path.is_file() else ([], None)
    last = lines[-1] if lines else {}
    if problem is not None or last.get("reason") not in ("steps", "seconds") or last["step"] != state.updates:
        return None
    if state.updates < run.updates and not (most and (last.get("seconds") or 0.0) >= most):
        return None
    losses = [line["loss"] for line in lines if line["kind"] == "validation" and line["step"]]
    return {"loss": losses[-1] if losses else None, "word_frequencies_only": None, **last}


def _newest(out: Path) -> Path:
    """The newest whole step folder; half-written ones are removed, broken ones named and set aside."""
    checkpoint.sweep(out)
    passed_over: list[str] = []
    step = checkpoint.newest(out, passed_over)
    checkpoint.set_broken_aside(out, step)
    for problem in passed_over:
        print(f"passed over {problem}; it is now named broken-...", file=sys.stderr)
    return step


def _train(
    parts: Parts, state: State, out: Path, world: World, *, is_resumed: bool, trackers: Sequence[journal.Tracker]
) -> Outcome:
    run, settings, model, batches = parts.run, parts.run.training, parts.model, parts.batches
    batch_tokens = settings.batch_rows * run.shape.row_tokens
    watch, verdict = Stopwatch(state.seconds), Verdict(world.device)
    plain_flops, executed_flops = flops_per_token(run)
    card = card_of_device(device_name(world.device))
    tokenizer = (parts.store.folder / "tokenizer.json").read_bytes()
    validation_loss: float | None = None
    saved = state if is_resumed else None
    loss_sum = torch.tensor(state.loss_sum, device=world.device)
    reason: Reason = "steps"
    logged_step, logged_at, validated_step = state.updates, watch.seconds, state.updates
    rate, norm = 0.0, torch.zeros(())
    stands_still = False

    with ExitStack() as stack:
        stack.callback(dismantle, parts.trained)
        book, plateau = None, None
        display = stack.enter_context(Display(run, parts.total_steps, out, enabled=world.leads))
        if world.leads:
            listeners = journal.listeners(trackers, out, dataclasses.asdict(run))
            resumed_at = (state.updates, state.batch_index) if is_resumed else None
            again = ("validation", "plateau") * state.validation_due + ("train",) * (state.loss_steps > 0)
            with disk_errors_are_refused(out / journal.JOURNAL, others=True):
                opened = journal.Journal(out / journal.JOURNAL, resumed_at, listeners, again)
                book = stack.enter_context(closing(opened))
            if parts.validation is not None:
                lines = journal.read(out / journal.JOURNAL)
                plateau = Plateau(run, parts.validation.unigram_loss, lines)
        signalled = stack.enter_context(signals(world))
        prefetch = stack.enter_context(
            Prefetch(batches, parts.first_row, parts.last_row, parts.micro_rows, world.device)
        )

        def note(kind: str, **values: Any) -> None:
            if book is not None:
                with disk_errors_are_refused(out / journal.JOURNAL, others=True):
                    book.add(kind, step=state.updates, **values)
                display.hear(kind, {"step": state.updates, **values})

        def save() -> Path:
            nonlocal saved
            folder = out / checkpoint.step_name(state.updates)
            with watch.paused():
                weights, moments = {}, {}
                if is_new := state != saved:
                    weights = gathered(model.state_dict(), world)
                    moments = gathered(optimizer_tensors(parts.optimizer), world)
                if world.leads:
                    if is_new:
                        now = dataclasses.replace(state, seconds=watch.seconds, loss_sum=float(loss_sum),
                                                  micro_rows=parts.micro_rows, processes=world.size)  # fmt: skip
                        with disk_errors_are_refused(folder, others=True):
                            checkpoint.write(out, run, now, weights, moments, tokenizer)
                    checkpoint.prune(out, settings.keep, state.best_step)  # also after a kill between the two
                    if is_new:
                        note("save", folder=folder.name, seconds=watch.seconds)
                saved = state
                world.wait()
            return folder

        def log(rate: float, norm: Tensor, comes_again: bool = False) -> None:
            """``comes_again``: a resumed run takes the line out, and logs these steps with those that follow."""
            nonlocal state, logged_step, logged_at
            seconds = watch.seconds
            made = state.updates - logged_step
            speed = made * batch_tokens / (seconds - logged_at)
            plain, executed = flops_per_token(run, range(state.batch_index - made, state.batch_index))
            note(
                "train",
                tokens=state.updates * batch_tokens,
                seconds=seconds,
                epoch=batches.epoch_of(state.batch_index),
                loss=float(loss_sum) / state.loss_steps,
                masking_rate=batches.masking_at(state.batch_index - 1).rate,
                learning_rate=rate,
                gradient_norm=float(norm),
                tokens_per_second=speed,
                flops_per_second=speed * executed,
                mfu=speed * plain / (card.peak * world.size) if card else None,
                memory_bytes=memory_bytes(world.device),
            )
            logged_step, logged_at = state.updates, seconds
            if not comes_again:
                loss_sum.zero_()
                state = dataclasses.replace(state, loss_steps=0)

        def breaks_off(done_share: float) -> bool:
            """Between the passes of a validation: a sign of life, and whether rank 0 has heard a signal."""
            display.validating(state.updates, done_share)
            return bool(world.decide(float(bool(signalled)))[0])

        def validate(is_saved: bool) -> None:
            nonlocal state, validation_loss, validated_step, stands_still
            validated_step = state.updates
            loss = None
            if parts.validation is not None:
                with watch.paused():
                    loss = parts.validation.loss(model, parts.micro_rows, parts.precision, world, breaks_off)
            state = dataclasses.replace(state, validation_due=parts.validation is not None and loss is None)
            if parts.validation is None or loss is None:
                return
            validation_loss = loss.overall if state.updates else None
            is_best = state.best_loss is None or loss.overall < state.best_loss
            if is_saved and is_best and math.isfinite(loss.overall):
                state = dataclasses.replace(state, best_loss=loss.overall, best_step=state.updates)
            note("validation", loss=loss.overall, by_source=loss.by_source, rate=parts.validation.rate,
                 rows=len(parts.validation), seconds=watch.seconds)  # fmt: skip
            if plateau is not None and plateau.hear(state.updates, loss.overall, watch.seconds):
                note("plateau", loss=loss.overall, unigram_loss=plateau.unigram_loss, seconds=watch.seconds)
                warn(f"{run.recipe}: {plateau.advice(state.updates)}")
                stands_still = settings.stops_on_plateau

        def settle() -> bool:
            """Count the update in flight as made or skipped; True where it was made."""
            nonlocal state
            skipped = verdict.read()
            if skipped is None:
                return False
            if not skipped:
                made, summed = state.updates + 1, state.loss_steps + 1
                state = dataclasses.replace(state, updates=made, loss_steps=summed, skips_in_a_row=0)
                return True
            state = dataclasses.replace(state, skips_in_a_row=state.skips_in_a_row + 1)
            index = state.batch_index - 1
            numbers = batches.keys_at(index)[1].tolist()
            note("skip", batch=index, rows=numbers[:64], skips_in_a_row=state.skips_in_a_row)
            if state.skips_in_a_row >= settings.max_skips:
                found = f"{state.skips_in_a_row} updates in a row that were not finite, the last on rows {numbers[:8]}"
                do = "Lower --training.learning-rate, or look at these rows; the last checkpoint stays"
                raise Diverged(f"{out}: step {state.updates}", found, "a finite loss and gradient", do)
            return False

        def stops(done_share: float) -> bool:
            """Between the micro-batches of a step: a sign of life, and whether to stop here, which one process may."""
            if display.is_due_in_step(done_share):
                in_flight = verdict.pending is not None
                display.tick(state.updates + in_flight + done_share, watch.seconds)
            return bool(signalled) and world.size == 1

        told = {"run": json.loads(run.to_json())} | facts(parts, world, plain_flops, executed_flops)
        told["unigram_loss"] = plateau and plateau.unigram_loss
        told["validation_text"] = parts.validation and parts.validation.text
        note("resume" if is_resumed else "start", **told)
        if not is_resumed or state.validation_due:
            validate(is_saved=True)
            save()

        # On batches without consequences, off the clock.
        if (parts.is_compiled or parts.uses_graphs) and state.updates < parts.total_steps:
            for index in batches.new_shapes_from(state.batch_index):
                warm = _accumulate(parts, prefetch.take(index), index, world, stops)
                float(0.0 if warm is None else warm)
                parts.optimizer.zero_grad(set_to_none=not parts.uses_graphs)
        watch.start()
        logged_at = watch.seconds
        display.begin(state.updates, logged_at)
        while state.updates < parts.total_steps:
            clock_share = watch.seconds / settings.max_seconds if settings.max_seconds else 0.0
            stop, stands, clock_share = world.decide(float(bool(signalled)), float(stands_still), clock_share)
            if stop or stands or clock_share >= 1:
                settle()
                reason = "signal" if stop else "plateau" if stands else "seconds"
                break
            loss = _accumulate(parts, prefetch.take(state.batch_index), state.batch_index, world, stops)
            settle()
            if loss is None:
                reason = "signal"
                break
            rate = learning_rate(settings, max(share_of_updates(state.updates, parts.total_steps), clock_share))
            norm, skipped = update(model, parts.optimizer, rate, settings.clip_norm, loss, parts.uses_graphs)
            verdict.watch(skipped)
            loss_sum += torch.where(skipped, 0.0, loss)
            state = dataclasses.replace(state, batch_index=state.batch_index + 1)

            step = state.updates + 1
            is_last = step == parts.total_steps
            logs, saves, validates = (
                (every > 0 and step % every == 0) or is_last
                for every in (settings.log_every, settings.save_every, settings.validate_every)
            )
            shows = display.is_due_after_step
            if not (logs or saves or validates or shows) or not settle():
                continue
            if logs:
                log(rate, norm)
            elif shows:
                display.tick(state.updates, watch.seconds, float(loss_sum) / state.loss_steps)
            if validates:
                validate(is_saved=saves)
            if saves:
                save()
        if state.updates > logged_step:
            log(rate, norm, comes_again=reason == "signal")
        elif state.loss_steps and book is not None:
            with disk_errors_are_refused(out / journal.JOURNAL, others=True):
                book.put_back("train")
        if reason == "seconds" and state.updates > validated_step:
            validate(is_saved=True)
        if state.validation_due:
            reason = "signal"
        last = save()
        note("end", reason=reason, seconds=watch.seconds, tokens=state.updates * batch_tokens,
             word_frequencies_only=plateau and plateau.is_there)  # fmt: skip
        was_signalled = bool(signalled)
    return Outcome(last, reason, validation_loss, was_signalled, plateau is not None and plateau.is_there)


def _accumulate(
    parts: Parts,
    micro_batches: list[Batch],
    index: int,
    world: World,
    stops: Callable[[float], bool] = lambda done_share: False,
) -> Tensor | None:
    """Forward and backward of this process's rows of batch ``index``; returns the mean loss of the whole batch, or None
    where ``stops``, asked before each micro-batch, said so: the batch then counts as not begun.

    Each micro-batch weighs by its rows, so any split gives the gradient of the whole batch's mean.
    """
    settings = parts.run.training
    total = torch.zeros((), device=world.device)
    for number, batch in enumerate(micro_batches):
        if stops(number / len(micro_batches)):
            return None
        torch.manual_seed(noise(settings.seed, DROPOUT, index, world.rank, number))
        with reducing(parts.trained, now=number == len(micro_batches) - 1):
            total += parts.forward_backward(batch)
    return world.total(total)
