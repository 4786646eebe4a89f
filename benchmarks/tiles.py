"""Tiles of the attention kernels: the sweep that ``TILES`` is chosen by, beside torch's cuDNN attention, on a GPU.

    python benchmarks/tiles.py --out results/tiles.json

One layer of base in bf16. Of each kernel and kind (bare; with dropout; with dropout and a table, as in MAE-LM) every
tile is tried while the other kernels keep theirs: timed is the forward pass for ``forward``, else the whole backward
pass, joining the gradients of the projections included (cuDNN's too). A tile that does not fit the card is listed as
failed. The JSON is written anew after each kernel and kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args
from unittest.mock import patch

import torch
import torch.nn.functional as F
from asked import asked, counts, read
from refusals import check_gpu, program
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from latemask import console
from latemask.errors import Refusal
from latemask.kernels import relative_attention
from latemask.machine import machine_of
from latemask.model.attention import RelativeBias
from latemask.recipes import recipe
from latemask.training.distributed import pick_device
from latemask.writing import write_json

WARMUP_MS, MEASURED_MS = 10, 40
SHAPE = recipe("mae_lm_base").shape


class Tile(NamedTuple):
    """As ``TILES`` has them."""

    queries: int
    keys: int
    warps: int
    stages: int
    """Of the pipeline."""


TRIED = (
    Tile(64, 64, 4, 1), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(64, 32, 4, 2), Tile(64, 32, 4, 3),
    Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(128, 128, 8, 2), Tile(64, 128, 4, 2),
    Tile(32, 64, 4, 1), Tile(32, 64, 4, 2), Tile(32, 64, 4, 3), Tile(128, 32, 8, 2),
)  # fmt: skip
Kernel = Literal["forward", "keys", "queries"]
KindName = Literal["bare", "drops", "table"]
PASSES: dict[Kernel, str] = {"forward": "forward", "keys": "backward", "queries": "backward"}
"""What is timed of each kernel."""


class Kind(NamedTuple):
    drops: bool
    has_table: bool


KINDS: dict[KindName, Kind] = {"bare": Kind(False, False), "drops": Kind(True, False), "table": Kind(True, True)}
Pass = Callable[[], Any]


@dataclass(frozen=True)
class Options:
    """Time the attention kernels with every tile."""

    out: Path = Path("results/tiles.json")
    """The JSON."""
    rows: int = 128
    """Of a batch."""
    row_tokens: tuple[int, ...] = (512, 435)
    """Tokens of a row where our attention stands beside cuDNN's: MLM's, and the visible ones of MAE-LM."""
    swept_tokens: int = 512
    """Tokens of a row where tiles are tried."""
    dropout: float = 0.1
    """Where a kind has dropout."""
    kernels: tuple[Kernel, ...] = get_args(Kernel)
    """Whose tiles are tried."""
    kinds: tuple[KindName, ...] = get_args(KindName)
    """Of each of them."""

    def __post_init__(self) -> None:
        for tokens in (*self.row_tokens, self.swept_tokens):
            if not 1 <= tokens <= SHAPE.row_tokens:
                raise Refusal("--row-tokens, --swept-tokens", str(tokens), f"1 to {SHAPE.row_tokens}, base's seats")
        counts(self, "rows")
        if not 0 < self.dropout < 1:
            raise Refusal("--dropout", f"{self.dropout:g}", "more than 0 and less than 1")


class Layer:
    """Random numbers in place of the projections of a batch, and of the gradient of what attention makes of them."""

    def __init__(self, options: Options, tokens: int, kind: Kind, device: torch.device) -> None:
        self.dropout = options.dropout if kind.drops else 0.0
        size = (options.rows, tokens)
        self.projected = torch.randn(*size, 3 * SHAPE.width, device=device, dtype=torch.bfloat16)
        self.d_out = torch.randn(*size, SHAPE.width, device=device, dtype=torch.bfloat16)
        self.relative: tuple[Any, ...] = (None,) * 5 + (0,)
        if kind.has_table:
            seats = torch.rand(options.rows, SHAPE.row_tokens, device=device).argsort(1)[:, :tokens].sort(1)[0]
            bias = RelativeBias(SHAPE.heads, SHAPE.relative_buckets, SHAPE.relative_distance, SHAPE.row_tokens)
            with torch.no_grad():
                self.relative = bias.to(device).by_distance(seats)

    def ours(self) -> tuple[Pass, Pass]:
        """Forward and backward pass by our kernels, to be run with the tiles that are in force now."""
        tokens, device = self.projected.shape[1], self.projected.device
        noise = relative_attention.draw_noise(tokens, device) if self.dropout else None
        inputs = (self.projected, SHAPE.heads, *self.relative, noise, self.dropout, None, None)

        def forward() -> tuple[Tensor, ...]:
            return torch.ops.latemask.self_attention(*inputs)

        outputs = forward()
        return forward, lambda: torch.ops.latemask.self_attention_backward(self.d_out, *inputs, *outputs)

    def cudnn(self) -> tuple[Pass, Pass]:
        """The same by torch, without a table."""
        projected = self.projected.detach().requires_grad_()

        def forward() -> Tensor:
            q, k, v = (x.unflatten(-1, (SHAPE.heads, -1)).transpose(1, 2) for x in projected.chunk(3, -1))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout).transpose(1, 2).flatten(2)

        out = forward()
        return forward, lambda: torch.autograd.grad(out, projected, self.d_out, retain_graph=True)


@contextmanager
def in_force(kernel: str, kind: str, tile: Tile) -> Iterator[None]:
    """``kernel`` takes ``tile`` for ``kind``, and tokens are padded as they would be were it in ``TILES``."""
    largest = max(relative_attention.LARGEST_TILE, tile.queries, tile.keys)
    with (
        patch.dict(relative_attention.TILES[kernel], {kind: tuple(tile)}),
        patch.object(relative_attention, "LARGEST_TILE", largest),
    ):
        yield


def chosen_tile(kernel: str, kind: str) -> Tile:
    """The one that ``TILES`` has."""
    return Tile(*relative_attention.TILES[kernel][kind])


def swept(kernel: Kernel, kind: KindName, time: Callable[[], float]) -> dict[str, Any]:
    """``time``, in ms, with every tile in force, ``TILES``' own among them; what does not fit the card is listed."""
    from triton.runtime.errors import OutOfResources  # pyright: ignore[reportMissingImports]

    times, failed = dict[Tile, float](), dict[Tile, str]()
    for tile in dict.fromkeys((*TRIED, chosen_tile(kernel, kind))):
        try:
            with in_force(kernel, kind, tile):
                times[tile] = time()
        except OutOfResources as error:
            failed[tile] = str(error)
    return judged(kernel, kind, times, failed)


def judged(kernel: Kernel, kind: KindName, times: Mapping[Tile, float], failed: Mapping[Tile, str]) -> dict[str, Any]:
    """What the JSON says of a kernel and kind; the first of two equally fast tiles counts as the fastest."""

    def told(tile: Tile | None) -> dict[str, Any] | None:
        return None if tile is None else tile._asdict() | {"ms": times.get(tile)}

    return {"kernel": kernel, "kind": kind, "pass": PASSES[kernel], "tried": [told(tile) for tile in times],
            "failed": [tile._asdict() | {"error": error} for tile, error in failed.items()],
            "fastest": told(min(times, key=times.__getitem__, default=None)),
            "chosen": told(chosen_tile(kernel, kind))}  # fmt: skip


def attention_of(name: str, tokens: int, kind: Kind, forward_ms: float, backward_ms: float) -> dict[str, Any]:
    """What the JSON says of one attention, ``ours`` or ``cudnn``."""
    return {"attention": name, "tokens": tokens, "drops": kind.drops, "has_table": kind.has_table,
            "forward_ms": forward_ms, "backward_ms": backward_ms}  # fmt: skip


def milliseconds(run: Pass) -> float:
    """The mean of a run's, caches of the card emptied before each."""
    from triton.testing import do_bench  # pyright: ignore[reportMissingImports]

    return cast(float, do_bench(run, warmup=WARMUP_MS, rep=MEASURED_MS))


def time_of(layer: Layer, part: str) -> float:
    """Of our forward or backward pass, with the tiles that are in force."""
    forward, backward = layer.ours()
    return milliseconds(forward if part == "forward" else backward)


def compared(options: Options, tokens: int, kind: Kind, device: torch.device) -> list[dict[str, Any]]:
    """Our attention with ``TILES`` as they are and, without a table, cuDNN's."""
    layer = Layer(options, tokens, kind, device)
    ways = {"ours": layer.ours} if kind.has_table else {"cudnn": layer.cudnn, "ours": layer.ours}
    return [attention_of(name, tokens, kind, *map(milliseconds, way())) for name, way in ways.items()]


def measure(options: Options) -> dict[str, Any]:
    """Measure all; write after each kernel and kind. Raises ``Refusal`` without a GPU."""
    device = pick_device()
    check_gpu(device, "tiles")
    found: dict[str, Any] = {
        "kind": "benchmark", "what": "tiles of the attention kernels", "rows": options.rows, "heads": SHAPE.heads,
        "head_width": SHAPE.width // SHAPE.heads, "precision": "bf16", "attention": [], "sweep": [],
        "tiles_in_force": relative_attention.TILES, "settings": asked(options), **machine_of(device),
    }  # fmt: skip
    for tokens in options.row_tokens:
        for kind in (Kind(drops, has_table) for drops in (False, True) for has_table in (False, True)):
            found["attention"] += compared(options, tokens, kind, device)
        write_json(options.out, found)
        console.say(f"beside cuDNN: {tokens} tokens")
    for name in options.kinds:
        layer = Layer(options, options.swept_tokens, KINDS[name], device)
        for kernel in options.kernels:
            found["sweep"].append(swept(kernel, name, partial(time_of, layer, PASSES[kernel])))
            write_json(options.out, found)
            console.say(f"{kernel}, {name}")
    return found


def rows_of_sweep(sweep: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """What is printed of each kernel and kind."""

    def cells(tile: dict[str, Any] | None) -> tuple[object, object]:
        if tile is None:
            return None, None
        return f"{tile['queries']} x {tile['keys']}, {tile['warps']}, {tile['stages']}", tile["ms"]

    return [(one["kernel"], one["kind"], one["pass"], *cells(one["fastest"]), *cells(one["chosen"]), len(one["failed"]))
            for one in sweep]  # fmt: skip


def main() -> None:
    options = read(Options)
    found = measure(options)
    columns = ("attention", "tokens", "dropout", "table", "forward ms", "backward ms")
    console.table(f"Attention of a layer of base, {options.rows} rows: {found['card']}", columns,
                  [(one["attention"], one["tokens"], "yes" if one["drops"] else "no",
                    "yes" if one["has_table"] else "no", one["forward_ms"], one["backward_ms"])
                   for one in found["attention"]])  # fmt: skip
    columns = ("kernel", "kind", "pass", "fastest: queries x keys, warps, stages", "ms", "TILES", "ms", "did not fit")
    console.table(f"Tiles at {options.swept_tokens} tokens", columns, rows_of_sweep(found["sweep"]))


if __name__ == "__main__":
    program(main)
