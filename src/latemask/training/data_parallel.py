"""Two ways for many processes to train one model: each holds all of it (DDP), or a shard of every parameter (FSDP2).

This file alone knows of the two. To the loop either is a module to be called with a batch, the gradients of whose
backward passes are averages over all processes. FSDP2 is imported where it shards: it takes most of a second, in which
a start that compiles could draw weights.

FSDP2: Zhao et al., PyTorch FSDP (2023), section 3.2, in its form of one DTensor a parameter
(``torch.distributed.fsdp.fully_shard``).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from latemask.config import Training
from latemask.errors import Refusal
from latemask.model.pretrainer import Pretrainer
from latemask.model.stack import Block
from latemask.training.distributed import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def refuse_uneven(training: Training, world: World) -> None:
    """Raise ``Refusal`` for a batch that these processes cannot share: each takes a row or more, and where the model
    is sharded equally many, since all of them gather the shards of each forward pass."""
    rows, size = training.batch_rows, world.size
    if rows < size:
        raise Refusal("training.batch_rows", str(rows), f"a row for each of {size} processes or more")
    if training.data_parallel == "shard" and rows % size:
        raise Refusal("training.batch_rows", str(rows), f"a multiple of {size} processes where they shard the model")


def placed(model: Pretrainer, world: World, training: Training, *, half: bool) -> Pretrainer:
    """``model`` on this process's device: whole, or with ``data_parallel`` "shard" this process's shard of it.

    A model on the CPU is moved and cut block by block, so that no device ever holds all of it. Blocks gather their
    weights one by one as they run, where the products are in ``half`` precision in bfloat16, and average gradients in
    float32; token table, doors and head are the root's, gathered in float32 for the whole pass.
    """
    if training.data_parallel == "replicate" or world.size == 1:
        return model.to(world.device)
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    numbers = MixedPrecisionPolicy(torch.bfloat16 if half else None, torch.float32, cast_forward_inputs=False)
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=numbers)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo's own average was a sum in some versions (pytorch/pytorch#162338)
            module.set_force_sum_reduction_for_comms(world.device.type == "cpu")
    warnings.filterwarnings(
        "ignore", "FSDP2-wrapped module", UserWarning
    )  # the losses are a view; nothing writes in it
    return model


def averaging(model: Pretrainer, world: World) -> nn.Module:
    """What the loop calls in place of the ``placed`` model; to be dismantled at the end."""
    if world.size == 1 or _sharded(model) is not None:
        return model
    ids = [world.device.index] if world.device.type == "cuda" else None
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # broadcast_buffers, from torch 2.13 on
        return DistributedDataParallel(model, ids, gradient_as_bucket_view=True, broadcast_buffers=False)


@contextmanager
def reducing(trained: nn.Module, now: bool) -> Iterator[None]:
    """Whether backward passes inside average all gradients so far over the processes, or leave that to a later one.

    Between the two each process holds the gradient of the whole model, its own rows'.
    """
    if (sharded := _sharded(trained)) is not None:
        sharded.set_requires_gradient_sync(now)
    with trained.no_sync() if isinstance(trained, DistributedDataParallel) and not now else nullcontext():
        yield


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which this process holds a shard; all processes must ask for it."""
    return tensor if (cut := _cut(tensor)) is None else cut.full_tensor()


def shard(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor if (cut := _cut(tensor)) is None else cut.to_local()


def like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The whole ``tensor`` placed as ``parameter`` is: on its device, cut as it is."""
    if (cut := _cut(parameter)) is None:
        return tensor.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, cut.device_mesh, cut.placements, src_data_rank=None)


def gathered(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """All tensors, whole, in the memory of rank 0's host; elsewhere none. All processes must ask for them.

    One at a time, so that a card holds no more than one of them whole.
    """
    found = {}
    for name, tensor in tensors.items():
        all_of_it = whole(tensor.detach())
        if world.leads:
            found[name] = all_of_it.cpu()
    return found


def dismantle(trained: nn.Module) -> None:
    """Free what ``averaging`` holds of the process group, before the group is left.

    Were it the last to hold the group, Python would free the group under its global lock and wait for ever for a thread
    of the group that waits for that lock.
    """
    if isinstance(trained, DistributedDataParallel):
        del trained.logger, trained.reducer


def _sharded(model: nn.Module) -> FSDPModule | None:
    """``model``, where its parameters were sharded."""
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    from torch.distributed.fsdp import FSDPModule

    return model if isinstance(model, FSDPModule) else None


def _cut(tensor: Tensor) -> DTensor | None:
    """``tensor``, where this process holds a shard of it."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None
