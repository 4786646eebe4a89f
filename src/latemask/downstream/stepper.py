"""One update: forward, backward, AdamW. On CUDA it is a graph, captured once for each width and launched as a whole.

Batches of fine-tuning are small (32 rows of 40 tokens), so that a GPU waits for the launches of kernels: a graph takes
them away. The only inputs of an update are the batch's row numbers, their weights and the learning rate. A stepper is
used again for the next point of a grid that differs only in what it reads anew: weights, seed, learning rates.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from latemask.downstream.bucketed import WIDTH_STEP, Batch, DeviceRows
from latemask.downstream.casts import Casts, used_once
from latemask.downstream.heads import FineTuned, losses
from latemask.downstream.settings import Settings
from latemask.errors import Refusal
from latemask.out_of_memory import is_out_of_memory
from latemask.training.compiler import compiles
from latemask.training.distributed import has_bf16
from latemask.training.graphs import broken_by

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN, whose gradient is NaN with a mask at some lengths (pytorch/pytorch#196678)."""
COMPILE_FROM_UPDATES = 4000
"""From so many updates of a process on, compiling pays for itself."""


class Labels:
    """What the loss compares with, on the device: [n, ...], or class numbers aligned with the flat ids (tokens)."""

    def __init__(self, values: Tensor, rows: DeviceRows | None = None):
        self.values, self.rows = values, rows

    def gather(self, numbers: Tensor, width: int) -> Tensor:
        if self.rows is None:
            return self.values[numbers]
        place = torch.arange(width, device=numbers.device)
        where = (self.rows.start[numbers][:, None] + place).clamp(max=len(self.values) - 1)
        return torch.where(place < self.rows.length[numbers][:, None], self.values[where], -100)


class Stepper:
    """Model, optimizer and the data on one device, to be used in a lane. ``step`` never waits for the device.

    ``updates``: as many as the process has before it.
    """

    def __init__(self, model: FineTuned, rows: DeviceRows, labels: Labels, settings: Settings, device: torch.device,
                 batch_rows: int, updates: float):  # fmt: skip
        self.model, self.rows, self.labels, self.settings, self.device = model, rows, labels, settings, device
        self.is_cuda = device.type == "cuda"
        self.uses_graphs = self.is_cuda and settings.graphs != "off"
        if settings.graphs == "on" and not self.is_cuda:
            raise Refusal("--graphs", f"on, on {device.type}", "a CUDA GPU")
        self.compiles = compiles(settings.compile, device, pays=updates >= COMPILE_FROM_UPDATES)
        self.numbers = torch.zeros(batch_rows, dtype=torch.int64, device=device)
        self.weight = torch.zeros(batch_rows, device=device)
        self.casts: Casts | None = None
        """Of products in bf16."""
        if in_bf16(device, settings):
            self.casts = Casts(model, used_once(model, lambda: self._scores(WIDTH_STEP), device))
        if self.compiles:
            compile_blocks(model.encoder)
        decayed = [weight for weight in model.parameters() if weight.ndim >= 2]
        plain = [weight for weight in model.parameters() if weight.ndim < 2]
        rate = torch.zeros((), device=device) if self.uses_graphs else 0.0
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=rate, betas=settings.betas, eps=settings.epsilon, fused=True, capturable=self.uses_graphs,
        )  # fmt: skip
        self.loss_sum = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None
        if self.uses_graphs:
            self._make_optimizer_state()

    def step(self, batch: Batch, learning_rate: float) -> None:
        """One update; an update whose loss or gradient is not finite is skipped and counted in ``skipped``."""
        self.numbers.copy_(torch.from_numpy(batch.rows), non_blocking=True)
        self.weight.copy_(torch.from_numpy(batch.weight), non_blocking=True)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate
        if self.uses_graphs:
            if batch.width not in self.graphs:
                self.graphs[batch.width] = self._captured(batch.width)
            self.graphs[batch.width].replay()
        else:
            self._update(batch.width)

    def begin(self, initial: dict[str, Tensor]) -> None:
        """Encoder weights back to ``initial``, the head's to the seed's, the optimizer's memory to nothing."""
        self.model.encoder.load_state_dict(initial)
        self.model.begin(self.settings.seed)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.loss_sum.zero_()
        self.skipped.zero_()
        torch.manual_seed(self.settings.seed)
        self.model.train()

    def _scores(self, width: int) -> Tensor:
        pairs = self.model.kind == "similarity"
        numbers = torch.cat([self.numbers, self.numbers + len(self.rows) // 2]) if pairs else self.numbers
        ids, real = self.rows.gather(numbers, width)
        with autocast(self.device, self.settings), sdpa_kernel(BACKENDS):
            return self.model(ids, real) if self.casts is None else self.casts(ids, real)

    def _loss(self, width: int) -> Tensor:
        scores = self._scores(width)
        loss = losses(self.model.kind, scores, self.labels.gather(self.numbers, width))
        return (loss * self.weight).sum() / self.weight.sum()

    def _backward(self, width: int) -> Tensor:
        """The gradients of all weights; the loss."""
        loss = self._loss(width)
        loss.backward()
        if self.casts is not None:
            self.casts.give_gradients()
        return loss.detach()

    def _update(self, width: int) -> None:
        loss = self._backward(width)
        weights = [weight for weight in self.model.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        if self.settings.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(weights, self.settings.clip_norm, norm)
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += torch.where(finite, loss, 0.0)
        self.skipped += ~finite

    def _captured(self, width: int) -> torch.cuda.CUDAGraph:
        """The update at this width as a graph. Warming up leaves weights, sums and random numbers as they were.

        It is captured in the lane's own stream: the workspace of matrix products goes by streams, and two graphs that
        run at the same time must not share one.
        """
        random = torch.cuda.get_rng_state(self.device)
        self._backward(width)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=torch.cuda.current_stream(self.device)):
                self._update(width)
        except RuntimeError as error:
            first = broken_by(error)
            if is_out_of_memory(first):
                raise first from None
            found = f"an encoder that cannot be captured ({str(first)[:200]})"
            raise Refusal("--graphs", found, "--graphs off") from error
        self.pool = self.pool or graph.pool()
        torch.cuda.set_rng_state(random, self.device)
        return graph

    def _make_optimizer_state(self) -> None:
        """AdamW's memory has to be there before a graph refers to it: one update with gradient and rate 0, undone."""
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this update runs outside of a graph
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()


@contextlib.contextmanager
def autocast(device: torch.device, settings: Settings) -> Iterator[None]:
    """bf16 products where the settings and the device have them.

    Nothing is cached between products: a graph would keep copies of weights that it then changes.
    """
    with torch.autocast(device.type, torch.bfloat16, enabled=in_bf16(device, settings), cache_enabled=False):
        yield


def in_bf16(device: torch.device, settings: Settings) -> bool:
    """Whether products are in bf16. Raises ``Refusal`` where they are to be and the GPU has none."""
    if settings.precision == "bf16" and device.type == "cuda" and not has_bf16(device):
        raise Refusal("--precision", "bf16, on a GPU without it", "fp32")
    return settings.precision == "bf16" or (settings.precision == "auto" and has_bf16(device))


def compile_blocks(encoder: nn.Module) -> None:
    """Compile block by block where the encoder has a stack of them, for any width."""
    stack = getattr(encoder, "stack", None)
    blocks = getattr(stack, "blocks", None)
    for part in blocks if blocks is not None else [encoder]:
        part.compile(dynamic=True)
