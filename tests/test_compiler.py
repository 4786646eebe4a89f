"""torch's compiler is there when the weights are, where it is wanted; nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from latemask.config import Training
from latemask.errors import Refusal
from latemask.model.stack import Door
from latemask.training import compiler
from latemask.training.compiler import begun_meanwhile, compiles

PROGRAM = """
import sys
import torch
from latemask.config import Training
from latemask.training.compiler import COMPILER, begun_meanwhile
for setting in sys.argv[1:]:
    assert COMPILER not in sys.modules
    with begun_meanwhile(Training(compile=setting), torch.device("cpu")):
        torch.manual_seed(0)
        drawn = [torch.randn(1_000).sum().item() for _ in range(100)]
    torch.manual_seed(0)
    print(setting, COMPILER in sys.modules, drawn == [torch.randn(1_000).sum().item() for _ in range(100)])
"""


LOOK_UPS = """
import sys
import torch
import torch._dynamo
from samples import batch_of, losses_and_gradients, pretrainer_of, small
from latemask.training.micro import compile_blocks

graphs = []

def kept(graph, _inputs, **_options):
    graphs.append(graph)
    return graph.forward

compile_ = torch.compile
torch.compile = lambda called, **options: compile_(called, **options | {"backend": kept})
for told in sys.argv[1:]:
    torch._dynamo.reset()
    graphs.clear()
    system, positions = told.split(",")
    run = small(system, positions=positions, dropout=0.0)
    plain, compiled = (pretrainer_of(run) for _ in range(2))
    compile_blocks(compiled)
    (losses, gradients), (found, theirs) = (losses_and_gradients(model, batch_of(run)) for model in (plain, compiled))
    torch.testing.assert_close(found, losses)
    torch.testing.assert_close(theirs, gradients)
    nodes = [node.target for graph in graphs for node in graph.graph.nodes]
    layers = sum(isinstance(node, type(torch.nn.functional.layer_norm)) and "layer_norm" in str(node) for node in nodes)
    called = {getattr(node, "__name__", str(node)) for node in nodes}
    print(told, layers > 0, sorted(called & {"embedding", "index_select", "gather", "take"}))
"""


def test_no_table_is_looked_up_in_what_is_compiled():
    """For the compiled gradient would be added up by atomics: a run would not repeat itself."""
    told = [f"{system},{way}" for system in ("mlm", "mae_lm", "decoder_cross") for way in ("absolute", "rotary")]
    command = [sys.executable, "-c", LOOK_UPS, *told]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    assert found.stdout.splitlines() == [f"{one} True []" for one in told]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [64, 128])
def test_positions_have_the_same_gradient_every_time(rows):
    """With as many tokens as a batch has: the bits are those of the first pass, the values those of torch's look-up."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(512, 768, device="cuda")
    seats = torch.stack([torch.randperm(512, device="cuda") for _ in range(rows)])
    above = torch.randn(rows, 512, 768, device="cuda")
    assert torch.equal(Door.look_up(table, seats), table(seats))
    first, *others = (torch.autograd.grad(Door.look_up(table, seats), table.weight, above)[0] for _ in range(6))
    assert all(torch.equal(other, first) for other in others)
    torch.testing.assert_close(first, torch.autograd.grad(table(seats), table.weight, above)[0], rtol=1e-5, atol=1e-4)


WIDTHS = """
import torch
import torch._dynamo
from latemask.kernels import relative_attention
from latemask.model.attention import Geometry, SelfAttention

relative_attention.is_supported = relative_attention.compiles_for_gpu = lambda *_: True
for start in (0, 100):
    torch._dynamo.reset()
    layer, graphs = SelfAttention(32, 2, 0.0).bfloat16(), []
    compiled = torch.compile(layer, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph)
    for tokens in (200, 300, 600):
        geometry = Geometry(bias=torch.zeros(2, 1, tokens, tokens))
        compiled(torch.randn(2, tokens, 32, dtype=torch.bfloat16), geometry, start)
    print(start, len(graphs))
"""


def test_padded_rows_of_any_width_are_compiled_once():
    """As in fine-tuning: our attention never serves them, so that no width is asked whether it pays."""
    found = subprocess.run([sys.executable, "-c", WIDTHS], capture_output=True, text=True, check=True)
    assert found.stdout == "0 1\n100 1\n"


COPIES = """
import copy
import pickle
import torch
from samples import batch_of, losses_and_gradients, pretrainer_of, small
from latemask.training.micro import compile_blocks

compile_ = torch.compile
torch.compile = lambda called, **options: compile_(called, **options | {"backend": "eager"})
run = small("mae_lm", dropout=0.0)
model = pretrainer_of(run)
names = list(model.state_dict())
for _ in range(2):
    compile_blocks(model)
first, _ = losses_and_gradients(model, batch_of(run))
for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
    other = pretrainer_of(run)
    with torch.no_grad():
        for one in (twin, other):
            for parameter in one.parameters():
                parameter.mul_(1.5)
    model.zero_grad()
    found, wanted = (losses_and_gradients(one, batch_of(run)) for one in (twin, other))
    torch.testing.assert_close(found, wanted)
    assert names == list(twin.state_dict()) == list(model.state_dict())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(losses_and_gradients(model, batch_of(run))[0], first)
"""


def test_a_copy_of_a_compiled_model_has_weights_of_its_own():
    subprocess.run([sys.executable, "-c", COPIES], check=True, cwd=Path(__file__).parent)


def test_the_compiler_is_imported_where_it_is_wanted():
    command = [sys.executable, "-c", PROGRAM, "off", "auto", "on"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["off False True", "auto False True", "on True True"]


def test_a_compiler_that_cannot_be_imported_is_told_by_whoever_uses_it(monkeypatch, capfd):
    monkeypatch.setattr(compiler, "COMPILER", "torch._no_such_compiler")
    with begun_meanwhile(Training(compile="on"), torch.device("cpu")):
        pass
    assert capfd.readouterr() == ("", "")


def test_a_gpu_begins_meanwhile_and_what_it_lacks_is_told_by_whoever_uses_it(monkeypatch, capfd):
    begun, zeros = [], torch.zeros

    def fails(*sizes, device):
        begun.append((threading.current_thread(), device))
        raise RuntimeError("no such card")

    monkeypatch.setattr(torch, "zeros", fails)
    with begun_meanwhile(Training(compile="off"), torch.device("cuda", 7)):
        zeros(1)
    [(thread, device)] = begun
    assert device == torch.device("cuda", 7)
    assert thread is not threading.main_thread()
    assert not thread.is_alive()
    assert capfd.readouterr() == ("", "")


def test_the_loop_imports_nothing_of_the_compiler_or_of_what_shards_a_model():
    """Both take most of a second: they come where they are used, or while weights are drawn."""
    program = "import sys, latemask.training.loop; print([name for name in sys.argv[1:] if name in sys.modules])"
    heavy = ["torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy",
             "transformers", "rich", "matplotlib"]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("given", "wanted"), [(None, "/caches/triton/1"), ("/mine", "/mine")])
def test_all_kernels_are_kept_in_one_place(monkeypatch, given, wanted):
    """Where torch would say so to Triton, had it something to compile; or where the user said."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/caches")
    monkeypatch.setattr(os, "makedirs", lambda *_, **__: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", given or "")
    if given is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    compiler._import(torch.device("cuda", 1))
    assert os.environ["TRITON_CACHE_DIR"] == wanted


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_cache_that_cannot_be_made_is_refused_by_name(monkeypatch, tmp_path, name):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
    with begun_meanwhile(Training(compile="off"), torch.device("cpu")):
        pass
    with (
        pytest.raises(Refusal, match=rf"TORCHINDUCTOR_CACHE_DIR: found .*{name} \("),
        begun_meanwhile(Training(compile="on"), torch.device("cpu")),
    ):
        pass


def test_an_error_of_the_body_comes_through():
    with pytest.raises(KeyError), begun_meanwhile(Training(compile="off"), torch.device("cpu")):
        raise KeyError


def test_compiling_is_the_default_on_cuda_alone():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for pays, on_cuda in ((True, True), (False, False)):
        assert [compiles(way, device, pays) for way in ("on", "off", "auto") for device in (cuda, cpu)] == [
            True, True, False, False, on_cuda, False]  # fmt: skip
