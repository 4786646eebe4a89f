"""What a run is made of on this process: built once from the Run and its data, then only used."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from latemask.batch import Batch
from latemask.config import Run
from latemask.console import warn
from latemask.errors import Refusal
from latemask.feed.batches import Rows, TrainingBatches
from latemask.model.pretrainer import Pretrainer
from latemask.text.store import TokenStore
from latemask.training.compiler import compiles
from latemask.training.data_parallel import averaging, placed, refuse_uneven
from latemask.training.distributed import World, has_bf16
from latemask.training.float8 import check_float8, multiply_in_float8
from latemask.training.graphs import Graphs, forward_backward, uses_graphs
from latemask.training.micro import compile_blocks, counted_micro_rows, find_micro_rows, recompute_blocks
from latemask.training.optimizer import load_optimizer_tensors, make_optimizer
from latemask.training.validation import Validation

PACKAGES = ("latemask", "torch", "numpy", "tokenizers")
"""Whose versions the journal names."""


@dataclass(frozen=True)
class Parts:
    """What a run is made of on this process."""

    run: Run
    store: TokenStore
    rows: Rows
    batches: TrainingBatches
    validation: Validation | None
    model: Pretrainer
    trained: nn.Module
    """The model, or its DistributedDataParallel; a sharded model is sharded in itself."""
    optimizer: torch.optim.AdamW
    precision: Callable[[], Any]
    is_compiled: bool
    forward_backward: Callable[[Batch], Tensor]
    """Of a micro-batch: adds to the gradients; its share of the batch's mean loss."""
    micro_rows: int
    first_row: int
    last_row: int
    total_steps: int

    @property
    def uses_graphs(self) -> bool:
        """Whether passes are CUDA graphs, which add to gradients where these are: they may be zeroed, not dropped."""
        return isinstance(self.forward_backward, Graphs)


def assemble(
    run: Run,
    store: TokenStore,
    model: Pretrainer,
    optimizer_state: dict[str, Tensor],
    micro_rows: int | None,
    world: World,
) -> Parts:
    """``micro_rows``: the checkpoint's, where as many processes go on with it; a number in the settings comes first."""
    settings, device = run.training, world.device
    refuse_uneven(settings, world)
    if settings.precision == "fp8":
        check_float8(device)
        multiply_in_float8(model, predictions=settings.batch_rows * run.predicted_tokens / world.size)
    model = placed(model, world, settings, half=multiplies_in_half(settings.precision, device)).train()
    rows = Rows(store.train, run.shape, run.most_masked_tokens, f"{store.folder} (train)")
    batches = TrainingBatches(rows, run.masking, settings.batch_rows, settings.order_seed, run.updates)
    first_row, last_row = world.share(settings.batch_rows)
    precision = autocast(settings.precision, device)
    mine = last_row - first_row
    if settings.recompute:
        recompute_blocks(model)
    is_compiled = compiles(settings.compile, device)
    micro_rows = settings.micro_rows or micro_rows
    if not micro_rows and is_compiled and multiplies_in_half(settings.precision, device):
        micro_rows = counted_micro_rows(run, mine, world)
    micro_rows = min(micro_rows or find_micro_rows(model, batches, mine, precision, world), mine)
    if is_compiled:
        compile_blocks(model)
    held_out, a_row = len(store.valid.tokens), run.shape.row_tokens - 1
    can_validate = settings.validate_every > 0 and held_out >= a_row
    if settings.validate_every > 0 and not can_validate and world.leads:
        warn(f"no validation: {store.folder} holds out {held_out:,} tokens, one row takes {a_row:,}")
    optimizer = make_optimizer(model, settings)
    load_optimizer_tensors(model, optimizer, optimizer_state)
    validation = Validation(run, store) if can_validate else None
    trained = averaging(model, world)
    work: Callable[[Batch], Tensor] = partial(forward_backward, trained, precision, settings.batch_rows, world.size)
    if uses_graphs(settings, world, is_compiled, micro_rows * run.shape.row_tokens):
        work = Graphs(work, model, device)
    return Parts(run, store, rows, batches, validation, model, trained, optimizer, precision, is_compiled, work,
                  micro_rows, first_row, last_row, run.updates)  # fmt: skip


def facts(parts: Parts, world: World, plain_flops: float, executed_flops: float) -> dict[str, Any]:
    return {
        "card": device_name(world.device),
        "world": world.size,
        "versions": {"python": sys.version.split()[0]} | {name: version(name) for name in PACKAGES},
        "micro_rows": parts.micro_rows,
        "rows": parts.rows.count,
        "refused_rows": len(parts.rows.refused),
        "dropped_tokens": parts.rows.dropped_tokens,
        "masked_tokens": parts.run.masked_tokens,
        "parameters": sum(parameter.numel() for parameter in parts.model.parameters()),
        "encoder_parameters": sum(parameter.numel() for parameter in parts.model.encoder.parameters()),
        "flops_per_token": executed_flops,
        "plain_flops_per_token": plain_flops,
    }


def multiplies_in_half(precision: str, device: torch.device) -> bool:
    """Whether matrix products are in bfloat16. Raises ``Refusal`` for bf16 on an Apple GPU."""
    if precision == "bf16" and device.type == "mps":
        raise Refusal("training.precision", "bf16 on an Apple GPU", "fp32 or auto")
    return precision in ("bf16", "fp8") or (precision == "auto" and has_bf16(device))


def autocast(precision: str, device: torch.device) -> Callable[[], Any]:
    """Nothing is cached between products: no pass casts a weight twice, and a graph would keep copies of weights that
    change."""
    if multiplies_in_half(precision, device):
        return lambda: torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
    return nullcontext


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
