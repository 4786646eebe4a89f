"""Forward and backward of a micro-batch, on CUDA in one launch: a graph, captured once for each shape of batch.

With few tokens a GPU is done with a kernel before the host has launched the next. A graph reads and writes where it did
when it was captured: a batch is copied into tensors that stay, gradients are added to tensors that stay. Its random
numbers follow from torch's generator as it is at the launch, so that a run with graphs is the run without, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from latemask.batch import Batch
from latemask.config import Training
from latemask.errors import Refusal
from latemask.out_of_memory import is_out_of_memory
from latemask.training.distributed import World

MOST_TOKENS = 32_768
"""More than these in one pass keep a GPU busy for longer than its kernels take to launch."""


def forward_backward(
    trained: nn.Module, precision: Callable[[], Any], batch_rows: int, processes: int, batch: Batch
) -> Tensor:
    """Adds to the gradients; the micro-batch's share of the mean loss of ``batch_rows`` rows.

    The backward pass of one of several ``processes``, whose gradients are averaged, is of so many times that share.
    """
    with precision():
        loss = trained(batch).mean() * (batch.rows / batch_rows)
    (loss * processes).backward()
    return loss.detach()


def uses_graphs(training: Training, world: World, is_compiled: bool, tokens: int) -> bool:
    """Whether passes of so many tokens are graphs: as the setting says, with "auto" where it is possible and pays.

    Raises ``Refusal`` for "on" where it is not possible: torch's recomputation looks at the generator in the pass.
    """
    obstacles = [
        (world.device.type != "cuda", f"on, on {world.device.type}", "a CUDA GPU"),
        (world.size > 1, f"on, with {world.size} processes", "one process"),
        (training.recompute, "on beside training.recompute", "one of the two"),
    ]
    for is_there, found, wanted in obstacles:
        if is_there and training.graphs == "on":
            raise Refusal("training.graphs", found, wanted, "Take auto or off")
    if training.graphs == "auto":
        return is_compiled and tokens <= MOST_TOKENS and not any(is_there for is_there, *_ in obstacles)
    return training.graphs == "on"


def broken_by(error: RuntimeError) -> RuntimeError:
    """What broke a capture, from the error it ended with: that it cannot be ended hides the first one."""
    return error.__context__ if isinstance(error.__context__, RuntimeError) else error


class Captured(NamedTuple):
    """The graph of one shape of batch."""

    batch: Batch
    """What it reads."""
    graph: torch.cuda.CUDAGraph
    loss: Tensor
    """What it leaves."""


class Graphs:
    """``work``, which adds to the gradients of ``model`` and returns a loss, in one launch; the loss stands until the
    next call."""

    def __init__(self, work: Callable[[Batch], Tensor], model: nn.Module, device: torch.device):
        self.work, self.model, self.device = work, model, device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.captured: dict[object, Captured] = {}

    def __call__(self, batch: Batch) -> Tensor:
        shape = (batch.n_unpredicted, *((name, tensor.shape) for name, tensor in batch.tensors.items()))
        if shape not in self.captured:
            self.captured[shape] = self._capture(batch)
        kept, graph, loss = self.captured[shape]
        torch._foreach_copy_(list(kept.tensors.values()), list(batch.tensors.values()))
        graph.replay()
        return loss

    def _capture(self, batch: Batch) -> Captured:
        """Leaves gradients and random numbers as they were; a gradient that was none is 0.

        Passes before, in the graph's own stream, compile, load and measure whatever is so at its first use. Meanwhile
        another thread makes the next batch, and may ask for memory.
        """
        random = torch.cuda.get_rng_state(self.device)
        gradients = list[Tensor]()
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            gradients.append(weight.grad)
        before = [gradient.clone() for gradient in gradients]
        kept, graph = batch.map(torch.clone), torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                self.work(kept)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                loss = self.work(kept)
        except RuntimeError as error:
            first = broken_by(error)
            if is_out_of_memory(first):
                raise first from None
            found = f"a pass that cannot be captured ({str(first)[:200]})"
            raise Refusal("training.graphs", found, "off") from error
        torch._foreach_copy_(gradients, before)
        torch.cuda.set_rng_state(random, self.device)
        return Captured(kept, graph, loss)
