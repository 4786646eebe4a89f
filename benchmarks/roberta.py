"""Pretrains transformers' own RobertaForMaskedLM on our rows and masks, at its best, and leaves a run folder of ours.

    python benchmarks/roberta.py mlm_base --data data/full --out runs/roberta --training.max-seconds 400

What anybody gets from the stock model at its best: its forward pass as shipped (head on every position), bf16
autocast, its layers compiled one by one (as a whole it is slower than eager, results/bench_base.json), no attention
mask, fused AdamW, everything else from the flags of ``latemask pretrain mlm_base``. Data, schedule, clock and
validation are ours, so that curves compare; weights are written under our names at each save, so that ``latemask
finetune``, ``evaluate``, ``rank`` and ``report`` take the folder like any other run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from refusals import program
from torch import Tensor

from latemask import config
from latemask.batch import Batch
from latemask.cards import card_of_device
from latemask.cli.options import parse_run
from latemask.counts import flops_per_token
from latemask.errors import Refusal
from latemask.feed.batches import Rows, TrainingBatches
from latemask.feed.prefetch import Prefetch
from latemask.hf.peers import compile_layers
from latemask.hf.stock import config_of, from_transformers, is_plain_mlm
from latemask.model.pretrainer import Pretrainer
from latemask.recipes import recipe
from latemask.text.store import open_store
from latemask.training import checkpoint, journal
from latemask.training.checkpoint import State
from latemask.training.distributed import World, pick_device
from latemask.training.loop import Reason
from latemask.training.optimizer import make_optimizer, optimizer_tensors, update
from latemask.training.parts import autocast, device_name
from latemask.training.plateau import Plateau, is_no_better
from latemask.training.schedules import learning_rate, share_of_updates
from latemask.training.validation import Validation
from latemask.training.watch import Stopwatch


@dataclass(frozen=True)
class Options:
    """Pretrain transformers' RoBERTa on prepared text."""

    data: Path
    """Folder of prepared text."""
    out: Path
    """Run folder, new."""
    overwrite: bool = False
    """Begin anew where the folder holds such a run: it does not resume."""


def read(arguments: Sequence[str]) -> tuple[Options, config.Run]:
    """Options and run of a command line. Raises ``Refusal`` for what the stock model does not compute."""
    name, *rest = arguments or ["--help"]
    absolute = config.replace(recipe(name if name[0] != "-" else "mlm_base"), {"shape.positions": "absolute"})
    options, run = parse_run(Options, absolute, rest if name[0] != "-" else arguments, prog="roberta.py RECIPE")
    if run.shape.positions != "absolute" or not is_plain_mlm(run):
        raise Refusal("RECIPE", f"{run.recipe} with {run.shape.positions} positions", "MLM, absolute positions")
    return options, run


def main() -> None:
    """Train, and write journal and checkpoints; the exit status is 1 where it stopped on the plateau."""
    options, run = read(sys.argv[1:])
    store = open_store(options.data)
    run = store.fitted(run)
    if options.out.exists():
        if not (options.overwrite and (options.out / "journal.jsonl").is_file()):
            raise Refusal(options.out, "something already there", "a new folder, or with --overwrite a run's")
        checkpoint.clear(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    if Trainer(run, options, store).train() == "plateau":
        sys.exit(1)


class Trainer:
    """The stock model, its optimizer, and where it stands."""

    def __init__(self, run: config.Run, options: Options, store: Any):
        settings = run.training
        self.run, self.options, self.store = run, options, store
        self.world = World(0, 1, pick_device())
        self.is_cuda = self.world.device.type == "cuda"
        torch.manual_seed(settings.seed)
        described = config_of(run, "roberta", fills_masks=True)
        assert isinstance(described, transformers.RobertaConfig)
        described.vocab_size = run.shape.padded_vocabulary  # a multiple of 64 is faster, for it too
        self.model: Any = transformers.RobertaForMaskedLM(described)
        self.model.to(self.world.device).train()
        self.optimizer = make_optimizer(self.model, settings)
        self.precision = autocast(settings.precision, self.world.device)
        if self.is_cuda:
            compile_layers(self.model)
        self.rows = Rows(store.train, run.shape, run.masked_tokens, f"{store.folder} (train)")
        self.batches = TrainingBatches(self.rows, run.masking, settings.batch_rows, settings.order_seed)
        self.micro_rows = settings.micro_rows or min(settings.batch_rows, 128 if self.is_cuda else 8)
        self.validation = Validation(run, store) if settings.validate_every else None
        self.validation_loss: float | None = None
        self.plateau = None if self.validation is None else Plateau(run, self.validation.unigram_loss)
        self.state = State(data=str(store.folder.resolve()), data_fingerprint=store.fingerprint)

    def train(self) -> Reason:
        """All updates, or as many as fit the seconds; why it ended."""
        run, settings, watch = self.run, self.run.training, Stopwatch()
        plain, _ = flops_per_token(run)
        card, batch_tokens = card_of_device(device_name(self.world.device)), settings.batch_rows * run.shape.row_tokens
        losses, logged_step, logged_at = torch.zeros((), device=self.world.device), 0, 0.0
        unigram_loss = self.plateau and self.plateau.unigram_loss
        reason: Reason = "seconds" if settings.max_seconds else "steps"
        prefetch = Prefetch(self.batches, 0, settings.batch_rows, self.micro_rows, self.world.device)
        with prefetch, closing(journal.Journal(self.options.out / "journal.jsonl")) as book:
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            book.add("start", step=0, run=json.loads(run.to_json()), card=device_name(self.world.device), world=1,
                     versions=versions, parameters=parameters, flops_per_token=plain, plain_flops_per_token=plain,
                     rows=self.rows.count, refused_rows=len(self.rows.refused), dropped_tokens=self.rows.dropped_tokens,
                     unigram_loss=unigram_loss, validation_text=self.validation and self.validation.text,
                     peer="transformers RobertaForMaskedLM")  # fmt: skip
            self._save(book, 0.0)
            self._accumulate(prefetch.take(0))  # compiles, off the clock
            self.model.zero_grad(set_to_none=True)
            watch.start()
            for step in range(1, settings.steps + 1):
                clock = watch.seconds / settings.max_seconds if settings.max_seconds else 0.0
                if clock >= 1:
                    break
                loss = self._accumulate(prefetch.take(self.state.batch_index))
                rate = learning_rate(settings, max(share_of_updates(step - 1, settings.steps), clock))
                norm, _ = update(self.model, self.optimizer, rate, settings.clip_norm, loss)
                losses += loss
                self.state = replace(self.state, batch_index=step, updates=step)
                if step % settings.log_every == 0:
                    mean = float(losses) / (step - logged_step)
                    seconds = watch.seconds
                    speed = (step - logged_step) * batch_tokens / (seconds - logged_at)
                    mfu = speed * plain / card.peak if card else None
                    book.add("train", step=step, tokens=step * batch_tokens, seconds=seconds, loss=mean,
                             learning_rate=rate, gradient_norm=float(norm), tokens_per_second=speed,
                             flops_per_second=speed * plain, mfu=mfu, memory_bytes=self._memory())  # fmt: skip
                    print(f"step {step:,}, {seconds:.0f} s, loss {mean:.3f}, {speed:,.0f} tokens/s", flush=True)
                    losses.zero_()
                    logged_step, logged_at = step, seconds
                with watch.paused():
                    if settings.validate_every and step % settings.validate_every == 0:
                        self._validate(book, watch.seconds)
                        if self._stands_still(book, watch.seconds):
                            reason = "plateau"
                    if settings.save_every and step % settings.save_every == 0:
                        self._save(book, watch.seconds)
                if reason == "plateau":
                    break
            with watch.paused():
                if reason != "plateau":
                    self._validate(book, watch.seconds)
                self._save(book, watch.seconds)
            book.add("end", step=self.state.updates, reason=reason, seconds=watch.seconds,
                     tokens=self.state.updates * batch_tokens,
                     word_frequencies_only=is_no_better(self.validation_loss, unigram_loss))  # fmt: skip
        return reason

    def _accumulate(self, micro_batches: list[Batch]) -> Tensor:
        total = torch.zeros((), device=self.world.device)
        for batch in micro_batches:
            ids = torch.empty_like(batch.ids).scatter(1, batch.positions, batch.ids)
            masked = batch.positions[:, batch.n_visible :]
            labels = torch.full_like(ids, -100).scatter(1, masked, ids.gather(1, masked))
            shown = ids.scatter(1, masked, self.run.shape.specials.mask)
            with self.precision():
                loss = self.model(input_ids=shown, labels=labels).loss * (batch.rows / self.run.training.batch_rows)
            loss.backward()
            total += loss.detach()
        return total

    def ours(self) -> Pretrainer:
        """The same weights in our model."""
        shape, ours = self.run.shape, Pretrainer(self.run)
        encoder = from_transformers(self.model, shape.specials).state_dict()
        head = self.model.lm_head
        tensors = {f"encoder.{name}": tensor for name, tensor in encoder.items()} | {
            "head.dense.weight": head.dense.weight, "head.dense.bias": head.dense.bias,
            "head.norm.weight": head.layer_norm.weight, "head.norm.bias": head.layer_norm.bias,
            "head.bias": head.bias[: shape.vocabulary],
        }  # fmt: skip
        ours.load_state_dict({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})
        return ours.eval()

    def _validate(self, book: journal.Journal, seconds: float) -> None:
        if self.validation is not None:
            model = self.ours().to(self.world.device)
            loss = self.validation.loss(model, self.micro_rows, self.precision, self.world)
            assert loss is not None
            self.validation_loss = loss.overall
            book.add("validation", step=self.state.updates, loss=loss.overall, by_source=loss.by_source,
                     rate=self.validation.rate, rows=len(self.validation), seconds=seconds)  # fmt: skip

    def _stands_still(self, book: journal.Journal, seconds: float) -> bool:
        """Whether the run is to end here, for it is no better than word frequencies: told as in a run of ours."""
        step, loss = self.state.updates, self.validation_loss
        if self.plateau is None or not self.plateau.hear(step, loss, seconds):
            return False
        book.add("plateau", step=step, loss=loss, unigram_loss=self.plateau.unigram_loss, seconds=seconds)
        return self.run.training.stops_on_plateau

    def _save(self, book: journal.Journal, seconds: float) -> None:
        if (self.options.out / checkpoint.step_name(self.state.updates)).exists():
            return
        tokenizer = (self.store.folder / "tokenizer.json").read_bytes()
        state = replace(self.state, seconds=seconds, micro_rows=self.micro_rows, processes=1)
        ours = self.ours()
        tensors = optimizer_tensors(make_optimizer(ours, self.run.training))  # its own has other names: not kept
        folder = checkpoint.write(self.options.out, self.run, state, ours.state_dict(), tensors, tokenizer)
        book.add("save", step=self.state.updates, folder=folder.name, seconds=seconds)

    def _memory(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.is_cuda else None


if __name__ == "__main__":
    program(main)
