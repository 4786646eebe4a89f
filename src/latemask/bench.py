"""``latemask bench``: full training steps of ours and of the peers on this machine, interleaved, beside the goals.

A step is forward, backward, clipping and optimizer on one micro-batch that stays on the device. Every entry is built
and warmed up first; then rounds of timed steps go through all of them in turn, and medians are reported. "Plain MLM"
is our stack without the saving in its last block, as everybody else runs it. Torch is imported only when it runs.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from latemask import console
from latemask.cards import card_of_device
from latemask.config import Run, replace
from latemask.counts import flops_per_token
from latemask.errors import Refusal
from latemask.goals import Size, Timed, goals_of, show
from latemask.machine import machine_of
from latemask.measurement import refuse_another
from latemask.out_of_memory import is_out_of_memory
from latemask.recipes import recipe
from latemask.writing import check_file, write_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from latemask.batch import Batch
    from latemask.feed.batches import TrainingBatches
    from latemask.hf.peers import Compiled, Peer

ROWS = {"tiny": 16, "base": 128, "large": 64}
"""Rows of a micro-batch of ours."""
PEER_ROWS = (32, 64, 128, 256)
"""RoBERTa's that are tried on a GPU."""


@dataclass(frozen=True)
class BenchOptions:
    """Time training steps of ours and of transformers' models on this machine, and print them beside the goals."""

    size: Literal["auto", "tiny", "base", "large"] = "auto"
    """Of the models; auto: base on a GPU, tiny on a CPU."""
    against: Literal["transformers", "none"] = "transformers"
    """The peers: RoBERTa (eager, compiled whole, compiled layer by layer, head on masked positions only) and ModernBERT
    of transformers."""
    only: tuple[str, ...] = ()
    """Names of entries (first column) to run; none given: all."""
    rows: int | None = None
    """Rows per step of ours; None: 128 (base), 64 (large), 16 (tiny)."""
    peer_rows: tuple[int, ...] = ()
    """Rows per step tried for RoBERTa; of all its ways and rows the fastest counts. None given: 32, 64, 128 and 256,
    on a CPU as many as ours."""
    rounds: int = 3
    """Times that all entries are gone through."""
    steps: int = 8
    """Timed steps of an entry in each round."""
    out: str | None = None
    """JSON file for everything measured; None: only the table."""
    overwrite: bool = False
    """Replace the result of another measurement that is there."""

    def __post_init__(self) -> None:
        some = (("rounds", self.rounds), ("steps", self.steps), ("rows", self.rows))
        for name, number in (*some, *(("peer-rows", rows) for rows in self.peer_rows)):
            if number is not None and number < 1:
                raise Refusal(f"--{name}", str(number), "at least 1")


@dataclass(frozen=True)
class Entry:
    """One thing to time. ``run`` gives data and FLOPs; a ``peer`` is trained in place of our model."""

    name: str
    run: Run
    rows: int
    is_plain: bool = False
    """Our MLM without the saving in the last block."""
    peer: Peer | None = None
    compiled: Compiled = "blocks"
    """Ours: blocks or not at all."""


def entries_of(size: Size, options: BenchOptions, compiles: bool, has_float8: bool = False) -> list[Entry]:
    """Everything to time at a size, in order; FP8 where the machine ``has_float8``, at base and large."""
    rows = options.rows or ROWS[size]

    def bare(name: str, dropout: float, **changes: Any) -> Run:
        """A recipe with absolute positions, where no others are told."""
        shape = {"shape.positions": "absolute", "shape.dropout": dropout}
        return replace(recipe(f"{name}_{size}"), {**shape, **{key.replace("__", "."): x for key, x in changes.items()}})

    mlm = bare("mlm", 0.1)
    entries = [
        Entry("plain mlm", bare("mlm", 0.0), rows, is_plain=True),
        Entry("mlm", bare("mlm", 0.0), rows),
        Entry("mlm, rotary", bare("mlm", 0.0, shape__positions="rotary"), rows),
        Entry("mlm, dropout", mlm, rows),
        Entry("mlm, dropout, rotary", bare("mlm", 0.1, shape__positions="rotary"), rows),
        Entry("mae_lm", bare("mae_lm", 0.0), rows),
        Entry("mae_lm cross-only", bare("decoder_cross", 0.0), rows),
        Entry("3ml .5", bare("three_ml", 0.0), rows),
        Entry("3ml_self .5, 2 layers", bare("three_ml_self", 0.0, decoder__depth=2), rows),
        Entry("3ml_self .5, 4 layers", bare("three_ml_self", 0.0, decoder__depth=4), rows),
        Entry("mae_lm, dropout", bare("mae_lm", 0.1), rows),
        Entry("mae_lm, dropout, relative bias", recipe(f"mae_lm_{size}"), rows),
    ]
    if has_float8 and size != "tiny":
        entries.append(Entry("mlm, fp8", bare("mlm", 0.0, training__precision="fp8"), rows))
    if options.against == "transformers":
        tried = tuple(dict.fromkeys(options.peer_rows)) or (PEER_ROWS if compiles else (rows,))
        ways: tuple[tuple[str, Compiled], ...] = (("eager", "no"), ("compiled", "whole"), ("blocks compiled", "blocks"))
        for (way, compiled), some in itertools.product(ways if compiles else ways[:1], tried):
            entries.append(Entry(f"roberta, {way}, {some} rows", mlm, some, peer="roberta", compiled=compiled))
        some = min(rows, max(tried))
        entries.append(Entry("roberta, head on masked", mlm, some, peer="roberta masked"))
        entries.append(Entry("modernbert", mlm, some, peer="modernbert"))
    if not compiles:
        entries = [dataclasses.replace(entry, compiled="no") for entry in entries]
    if unknown := set(options.only) - {entry.name for entry in entries}:
        raise Refusal("--only", ", ".join(sorted(unknown)), f"some of: {'; '.join(entry.name for entry in entries)}")
    return [entry for entry in entries if not options.only or entry.name in options.only]


def _refuse_unknown(options: BenchOptions) -> None:
    """Raise ``Refusal`` for an entry that no machine has, before torch says which kind this is."""
    sizes: tuple[Size, ...] = ("base", "tiny") if options.size == "auto" else (options.size,)
    everything = dataclasses.replace(options, only=())
    known = dict.fromkeys(entry.name for size in sizes for compiles in (False, True)
                          for entry in entries_of(size, everything, compiles, has_float8=True))  # fmt: skip
    if unknown := set(options.only) - known.keys():
        raise Refusal("--only", ", ".join(sorted(unknown)), f"some of: {'; '.join(known)}")


def run_bench(options: BenchOptions) -> None:
    """Print the tables of ``latemask bench``. Raises ``Refusal`` for unknown entries, before anything runs for an
    ``out`` that can be no file or holds the result of another measurement, and where no entry fits the device."""
    if options.out is not None:
        check_file(Path(options.out))
    _refuse_unknown(options)
    import torch

    from latemask.training.float8 import is_possible

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    size: Size = options.size if options.size != "auto" else "base" if on_gpu else "tiny"
    machine = machine_of(device)
    flags = {name: getattr(options, name) for name in ("only", "against", "rows", "peer_rows", "rounds", "steps")}
    measured = {"kind": "bench", "size": size, **machine, "options": flags}
    if options.out is not None:
        refuse_another(Path(options.out), measured, options.overwrite)
    steppers = []
    entries = entries_of(size, options, compiles=on_gpu, has_float8=is_possible(device))
    for number, entry in enumerate(entries, 1):
        console.say(f"building {number} of {len(entries)}: {entry.name} ({entry.rows} rows)")
        stepper = built(entry, device)
        if stepper is not None:
            steppers.append(stepper)
    began = time.perf_counter()
    for number in range(1, options.rounds + 1):
        for stepper in list(steppers):
            try:
                stepper.time(options.steps)
            except (RuntimeError, MemoryError) as error:  # beside all others' weights
                if not is_out_of_memory(error):
                    raise
                _leave_out(stepper.entry)
                steppers.remove(stepper)
        if steppers:
            left = (time.perf_counter() - began) / number * (options.rounds - number)
            console.say(f"round {number} of {options.rounds} done, about {left:,.0f} s left")
    if not steppers:
        raise Refusal("--rows, --peer-rows", "no entry that fits the memory", "fewer rows, or a smaller --size")
    peak = card.peak if (card := card_of_device(machine["card"])) else None
    found = {stepper.entry.name: stepper.result(peak) for stepper in steppers}
    goals = goals_of(size, found)
    kept = {**measured, "row_tokens": recipe(f"mlm_{size}").shape.row_tokens,
            "entries": [dataclasses.asdict(timed) for timed in found.values()],
            "goals": [dataclasses.asdict(goal) for goal in goals]}  # fmt: skip
    if options.out is not None:
        write_json(Path(options.out), kept)
    show(size, machine, found, goals)


def spread(rounds: list[float], middle: float) -> float | None:
    """Largest minus smallest round, over ``middle``; None of one round, which has none."""
    return (max(rounds) - min(rounds)) / middle if len(rounds) > 1 else None


class Stepper:
    """A built entry: a step function, and the times of its steps."""

    def __init__(self, entry: Entry, step: Callable[[], None], device: torch.device):
        self.entry, self.step, self.device = entry, step, device
        self.rounds: list[list[float]] = []
        self.first_step_seconds = 0.0
        self.memory_bytes: int | None = None

    def time(self, steps: int) -> None:
        """Seconds of each of ``steps`` steps, after one that does not count."""
        import torch

        self.step()
        if self.device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
            events[0].record()
            for event in events[1:]:
                self.step()
                event.record()
            torch.cuda.synchronize()
            self.rounds.append([a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)])
            return
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - started)
        self.rounds.append(seconds)

    def result(self, peak: float | None) -> Timed:
        entry, medians = self.entry, [statistics.median(seconds) for seconds in self.rounds]
        step = statistics.median(second for seconds in self.rounds for second in seconds)
        speed = entry.rows * entry.run.shape.row_tokens / step
        plain, executed = flops_per_token(entry.run)
        if entry.peer == "modernbert":
            plain = executed = None
        elif entry.peer is not None:
            executed = None
        elif entry.is_plain:
            executed = plain
        return Timed(entry.name, entry.rows, 1e3 * step, spread(medians, step), speed, plain, executed,
                     speed * plain / peak if plain and peak else None,
                     speed * executed / peak if executed and peak else None,
                     self.memory_bytes, self.first_step_seconds)  # fmt: skip


def built(entry: Entry, device: torch.device) -> Stepper | None:
    """Model, optimizer and batch of an entry, after two steps; None where it does not fit the device."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        return _built(entry, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    _leave_out(entry)
    return None


def _leave_out(entry: Entry) -> None:
    console.warn(f"{entry.name}: {entry.rows} rows do not fit the memory, left out")


def _built(entry: Entry, device: torch.device) -> Stepper:
    import torch

    from latemask.training.optimizer import make_optimizer, update

    on_gpu = device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    torch.manual_seed(0)
    batch = random_batches(entry.run, entry.rows).batch_at(0).to(device)
    model, loss_of = made(entry, batch, device)
    optimizer = make_optimizer(model, entry.run.training)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = loss_of()
        loss.backward()
        update(model, optimizer, 1e-4, 1.0, loss.detach())

    stepper = Stepper(entry, step, device)
    step()
    if on_gpu:
        torch.cuda.synchronize()
    stepper.first_step_seconds = time.perf_counter() - started
    step()
    if on_gpu:
        torch.cuda.synchronize()
        stepper.memory_bytes = torch.cuda.max_memory_allocated() - before
    return stepper


def made(entry: Entry, batch: Batch, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model of an entry on the device, and its loss on ``batch``."""
    if entry.peer is None:
        return _ours(entry, batch, device)
    from latemask.hf.peers import peer_of

    return peer_of(entry.peer, entry.run, batch, device, entry.compiled)


def _ours(entry: Entry, batch: Batch, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    import torch._dynamo.config as dynamo

    from latemask.model.decoders import NoDecoder
    from latemask.model.heads import Prediction
    from latemask.model.pretrainer import Pretrainer
    from latemask.training.float8 import multiply_in_float8
    from latemask.training.micro import compile_blocks

    class PlainNoDecoder(NoDecoder):
        """The whole last block is run, then the masked positions are read."""

        reads_predicted_only = False

        def forward(self, encoded, batch, mask, tokens) -> Prediction:
            return Prediction(encoded.x[:, batch.first_predicted :], batch.targets)

    model = Pretrainer(entry.run)
    if entry.is_plain:
        model.decoder = PlainNoDecoder(entry.run.shape)
    model = model.to(device).train()
    if entry.run.training.precision == "fp8":
        multiply_in_float8(model, predictions=batch.rows * entry.run.predicted_tokens)
    if entry.compiled == "blocks":
        compile_blocks(model)
        dynamo.recompile_limit = 256  # Many models share the code of one Block here.
    return model, lambda: model(batch).mean()


def random_batches(run: Run, rows: int) -> TrainingBatches:
    """Batches of rows of random tokens, documents of 400."""
    import numpy as np

    from latemask.feed import batches

    @dataclass
    class Random:
        tokens: np.ndarray
        starts: np.ndarray
        sources: np.ndarray | None = None
        unknown_tokens: int = 0

        def read(self, begins: np.ndarray, length: int) -> np.ndarray:
            return self.tokens[begins[:, None] + np.arange(length)]

    random = np.random.default_rng(0)
    count = run.shape.row_tokens * (rows + 1)
    ordinary = np.setdiff1d(np.arange(run.shape.vocabulary), run.shape.specials.ids)
    tokens = random.choice(ordinary, count).astype(np.uint16)
    ends = np.append(np.arange(399, count - 1, 400), count - 1)
    tokens[ends] = run.shape.specials.eos
    stream = Random(tokens, np.concatenate([[0], ends + 1]))
    all_rows = batches.Rows(stream, run.shape, run.most_masked_tokens)
    return batches.TrainingBatches(all_rows, run.masking, rows, 0, run.updates)
