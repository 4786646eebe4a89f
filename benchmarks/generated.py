"""What torch's compiler makes of a block for a Hopper GPU, without one: its kernels, and the bytes that each moves.

    python benchmarks/generated.py --out results/generated.json

The block is traced on the CPU, forward and backward, as a training step runs it (bf16 autocast, 128 rows of 512 tokens
of base); then its graphs are said to lie on a GPU, lowered and scheduled as for one, up to the code, which nothing
runs. Attention is a black box, as our kernel is to the compiler, and products are the library's. Bytes are what the
compiler counts: inputs and outputs of a kernel, once each. All of it goes by inner parts of torch (2.11 and 2.13 were
tried): a later one may want another way. Another commit is read with its ``src`` on PYTHONPATH.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from asked import asked, counts, read
from refusals import program
from torch import Tensor
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map

from latemask import console
from latemask.kernels import relative_attention
from latemask.model.attention import Geometry
from latemask.model.stack import Block
from latemask.recipes import recipe
from latemask.writing import write_json

PROPERTIES = SimpleNamespace(
    name="Hopper", type="cuda", index=0, multi_processor_count=132, major=9, minor=0, warp_size=32,
    regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49_152, shared_memory_per_block_optin=232_448, shared_memory_per_multiprocessor=233_472,
    L2_cache_size=50 << 20, total_memory=80 << 30, gcnArchName="",
)  # fmt: skip
ON_GPU = torch.device("cuda", 0)
WHAT = "kernels that torch's compiler makes of a block for a Hopper GPU"


@dataclass(frozen=True)
class Options:
    """List the kernels of a block."""

    out: Path = Path("results/generated.json")
    """The JSON."""
    size: str = "base"
    """Of the block: that of the recipe mlm_SIZE."""
    rows: int = 128
    """Of as many tokens as the recipe's."""
    dropout: tuple[float, ...] = (0.0, 0.1)
    """Shares to drop, one after the other."""

    def __post_init__(self) -> None:
        counts(self, "rows")


@torch.library.custom_op("generated::attention", mutates_args=())
def attention(projected: Tensor) -> Tensor:
    return projected[..., : projected.shape[-1] // 3].clone()


@attention.register_fake
def _(projected):
    return projected.new_empty(*projected.shape[:-1], projected.shape[-1] // 3)


@torch.library.custom_op("generated::attention_backward", mutates_args=())
def attention_backward(gradient: Tensor, projected: Tensor) -> Tensor:
    return projected.clone()


@attention_backward.register_fake
def _(gradient, projected):
    return torch.empty_like(projected)


attention.register_autograd(
    lambda ctx, gradient: attention_backward(gradient, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The model takes the ways that it takes where it is compiled for a GPU, attention a black box's."""
    with (
        patch.object(torch.Tensor, "is_cuda", True),
        patch("torch.compiler.is_compiling", lambda: True),
        patch.object(relative_attention, "pays", lambda *_, **__: True),
        patch.object(relative_attention, "self_attention", lambda projected, *_: attention(projected)),
    ):
        yield


@contextmanager
def hopper() -> Iterator[None]:
    """torch and Triton find a Hopper GPU."""
    from instructions import HOPPER
    from triton.runtime import driver

    target = SimpleNamespace(get_current_target=lambda: HOPPER, get_current_device=lambda: 0,
                             get_active_torch_device=lambda: ON_GPU)  # fmt: skip
    driver.set_active(target)  # type: ignore[arg-type]
    found = {
        "is_available": True, "is_initialized": False, "device_count": 1, "current_device": 0, "set_device": None,
        "get_device_capability": (9, 0), "get_device_properties": PROPERTIES, "_get_device_properties": PROPERTIES,
        "_lazy_init": None, "synchronize": None, "set_rng_state": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }  # fmt: skip
    answers = {name: partial(lambda value, *_, **__: value, value) for name, value in found.items()}
    with (
        patch.multiple(torch.cuda, create=True, **answers),
        patch("torch._inductor.scheduler.has_triton", lambda *_: True),
        patch("torch._subclasses.fake_tensor.init_gpu_context", lambda *_: None),
    ):
        yield


def traced(options: Options, dropout: float) -> dict[str, torch.fx.GraphModule]:
    """The forward and the backward graph of a block, as the compiler divides them, on the CPU."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    shape = recipe(f"mlm_{options.size}").shape
    block = Block(shape.width, shape.heads, shape.feedforward, sublayers=("self",), memory_width=0,
                  epsilon=shape.norm_epsilon, dropout=dropout, pre_norm=False).train()  # fmt: skip
    names, found = [name for name, _ in block.named_parameters()], {}
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        with as_on_a_gpu(), torch.autocast("cpu", torch.bfloat16):
            return torch.func.functional_call(block, dict(zip(names, weights, strict=True)), (x, Geometry()))

    def divided(graph: torch.fx.GraphModule, *given: Any, **more: Any) -> Any:
        with V.set_fake_mode(fake):
            joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, *given, **more | {"compiler": "inductor"})

    def kept(name: str, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        found[name] = gm
        return make_boxed_func(gm.forward)

    compiled = aot_function(forward, partial(kept, "forward"), partial(kept, "backward"), divided,
                            select_decomp_table())  # fmt: skip
    with fake:
        x = torch.empty(options.rows, shape.row_tokens, shape.width, dtype=torch.bfloat16, requires_grad=True)
        weights = [torch.empty(weight.shape, requires_grad=True) for weight in block.parameters()]
        compiled(x, *weights).sum().backward()
    return found


def moved(graph: torch.fx.GraphModule) -> FakeTensorMode:
    """Say of the graph and of all that it holds that it lies on a GPU."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def on_gpu(value: Any) -> Any:
        if isinstance(value, torch.device):
            return ON_GPU
        if not isinstance(value, Tensor):
            return value
        with fake:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=ON_GPU)

    for node in graph.graph.nodes:
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), on_gpu)
        if "val" in node.meta:
            node.meta["val"] = tree_map(on_gpu, node.meta["val"])
    graph.recompile()
    return fake


def kernels(graph: torch.fx.GraphModule) -> list[dict[str, Any]]:
    """Those of a graph in their order: a name, bytes read and written, and whether the library has it."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
    from torch._inductor.virtualized import V

    with hopper():
        fake = moved(graph)
        inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        with V.set_fake_mode(fake), torch.no_grad(), V.set_debug_handler(DebugContext()):
            post_grad_passes(graph, is_inference=False)
            view_to_reshape(graph)
            lowered = GraphLowering(graph, example_inputs=inputs, shape_env=fake.shape_env, is_inference=False)
            with V.set_graph_handler(lowered):
                lowered.run(*inputs)
                lowered.codegen()
                nodes = [node for node in lowered.scheduler.nodes if not isinstance(node, NopKernelSchedulerNode)]
                return [told(node, isinstance(node, ExternKernelSchedulerNode)) for node in nodes]


def told(node: Any, is_library: bool) -> dict[str, Any]:
    """A kernel, from the operations that are fused in it; the library's by its name there."""
    from torch._inductor.utils import get_fused_kernel_name

    fused = get_fused_kernel_name(node.get_nodes(), "original_aten")
    name = getattr(node.node, "python_kernel_name", None) if is_library else fused
    is_library &= "latemask" not in str(name)
    return {"kernel": str(name), "bytes": node.get_read_write_buffers_sizes(), "is_library": is_library}


def measure(options: Options) -> list[dict[str, Any]]:
    """The kernels of both passes at each dropout."""
    return [{"dropout": dropout, "pass": name, **kernel} for dropout in options.dropout
            for name, graph in traced(options, dropout).items() for kernel in kernels(graph)]  # fmt: skip


def main() -> None:
    options = read(Options)
    found = measure(options)
    write_json(options.out, {"kind": "benchmark", "what": WHAT, "kernels": found, "settings": asked(options),
                             "versions": {"torch": torch.__version__}})  # fmt: skip
    for (dropout, name), some in itertools.groupby(found, lambda one: (one["dropout"], one["pass"])):
        rows = [(one["kernel"][:70], "library" if one["is_library"] else "", one["bytes"] / 1e6) for one in some]
        total = sum(megabytes for _, library, megabytes in rows if not library)
        console.table(f"{name}, dropout {dropout:g}: {total:,.0f} MB by kernels that are no library's",
                      ("kernel", "", "MB"), rows)  # fmt: skip


if __name__ == "__main__":
    program(main)
