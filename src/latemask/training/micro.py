"""How many rows fit in one forward pass, and compiled blocks: what makes a step fit the card and go fast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from latemask.config import Run
from latemask.counts import memory
from latemask.errors import Refusal
from latemask.feed.batches import TrainingBatches
from latemask.kernels.relative_attention import is_supported
from latemask.model.pretrainer import Pretrainer
from latemask.model.stack import Block, Door, Stack
from latemask.out_of_memory import out_of_memory_is_refused
from latemask.training.data_parallel import shard
from latemask.training.distributed import World

ENOUGH_TOKENS = 65_536
"""More tokens than these in one forward pass no longer make a GPU faster."""
CPU_TOKENS = 4_096
"""The same for a CPU, where a larger batch only leaves the caches."""
MEMORY_SHARE = 0.8
"""Of the free memory that may be filled: compiled kernels and all-reduce buffers take some too."""
PLENTY = 2.0
"""Of the bytes counted for compiled blocks in half precision, which were within 6 % of those measured at base and large
(results/bench_base.json, bench_large.json): where so many times as many fit, nothing needs to be measured."""


def compile_blocks(model: Pretrainer) -> None:
    """Compile each Block and Door, not the whole net (one short compilation serves all); an endless recompile is an
    error. Each masking rate of the run has row lengths of its own."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = 32 * len(model.run.stages)
    dynamo.fail_on_recompile_limit_hit = True
    for module in model.modules():
        if isinstance(module, Block | Door):
            module.compile(dynamic=False)


def recompute_blocks(model: Pretrainer) -> None:
    """Keep each block's input alone for the backward pass: the same bits, a third more FLOPs, far less memory."""
    for module in model.modules():
        if isinstance(module, Stack):
            module.recomputes = True


def counted_micro_rows(run: Run, rows: int, world: World) -> int | None:
    """What ``find_micro_rows`` finds where every process's card has room in plenty, by count alone; None where one has
    not, off GPUs, and without the kernels, whose plain twins keep more. Blocks are to be compiled, products in half
    precision."""
    device, shape = world.device, run.shape
    if device.type != "cuda" or not is_supported(device, torch.bfloat16, shape.width // shape.heads):
        return None
    wanted = _divisor(rows, max(1, ENOUGH_TOKENS // shape.row_tokens))
    free, _ = torch.cuda.mem_get_info(device)
    fits = PLENTY * memory(run, wanted, cards=world.size).total <= MEMORY_SHARE * free
    return world.least(wanted if fits else 0) or None


def find_micro_rows(model: Pretrainer, batches: TrainingBatches, rows: int, precision: Callable, world: World) -> int:
    """Rows for one forward pass: a divisor of ``rows`` that fits the device's memory by two measured points at each
    masking rate of the run; where processes have different room or ``rows``, the least of them counts for all.

    Gradients are held while it measures: else their arrival hides what few rows' activations take, and the line between
    the two points rises too little. Raises ``Refusal`` where not even one row fits.
    """
    device = world.device
    row_tokens = model.run.shape.row_tokens
    if device.type != "cuda":
        return world.least(_divisor(rows, max(1, CPU_TOKENS // row_tokens)))
    most = max(1, ENOUGH_TOKENS // row_tokens)
    free, _ = torch.cuda.mem_get_info(device)
    moments = sum(8 * shard(parameter).numel() for parameter in model.parameters())
    optimizer_bytes = moments + sum(4 * parameter.numel() for parameter in model.parameters())  # and gradients, whole
    _step_bytes(model, batches, 0, 1, precision, device)
    for index in batches.new_shapes_from(0):
        small, large = (_step_bytes(model, batches, index, some, precision, device) for some in (1, min(rows, 4)))
        a_row = max((large - small) / max(min(rows, 4) - 1, 1), 1)
        fits = world.least(int((free * MEMORY_SHARE - optimizer_bytes - max(small - a_row, 0)) / a_row))
        if fits < 1:
            wanted = f"{(optimizer_bytes + small) / 1e9:.1f} GB for one row"
            raise Refusal("training.micro_rows", f"{free / 1e9:.1f} GB free on the card", wanted,
                          "Choose a smaller recipe")  # fmt: skip
        most = min(most, fits)
    for parameter in model.parameters():
        parameter.grad = None
    return world.least(_divisor(rows, most))


def _step_bytes(
    model: Pretrainer, batches: TrainingBatches, index: int, rows: int, precision: Callable, device: torch.device
) -> int:
    """Bytes that a pass takes beyond what is held before it; its gradients stay."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with rows_are_to_fit(rows), precision():
        model(batches.batch_at(index, 0, rows).to(device)).mean().backward()
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.empty_cache()
    return peak


def _divisor(rows: int, most: int) -> int:
    """The largest divisor of ``rows`` that is at most ``most``, unless it is less than half of that."""
    best = max(divisor for divisor in range(1, min(rows, most) + 1) if rows % divisor == 0)
    return best if 2 * best >= min(rows, most) else min(rows, most)


def rows_are_to_fit(micro_rows: int, saved: bool = False) -> AbstractContextManager[None]:
    """What refuses a pass of so many rows for which memory does not suffice, saying what to set: also, where the run
    has ``saved`` its beginning, what lets the same command meet it."""
    goes_on, anew = (" --resume-if-present", ", with --overwrite") if saved else ("", "")
    instead = f"set --training.micro-rows {micro_rows // 2}{goes_on}: the batch and the result stay the same"
    if micro_rows == 1:
        instead = f"choose a smaller recipe, or lower --shape.row-tokens{anew}"
    work = f"for {micro_rows} row{'s' if micro_rows > 1 else ''} at once"
    return out_of_memory_is_refused("training.micro_rows", instead, work)
