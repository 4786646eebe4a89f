"""torch's compiler is there when the weights are, where it is wanted; nothing else changes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from latemask.config import Training
from latemask.training import compiler
from latemask.training.compiler import compiles, imported_meanwhile

PROGRAM = """
import sys
import torch
from latemask.config import Training
from latemask.training.compiler import COMPILER, imported_meanwhile
assert COMPILER not in sys.modules
with imported_meanwhile(Training(compile=sys.argv[1]), torch.device("cpu")):
    torch.manual_seed(0)
    drawn = [torch.randn(1_000).sum().item() for _ in range(100)]
torch.manual_seed(0)
print(COMPILER in sys.modules, drawn == [torch.randn(1_000).sum().item() for _ in range(100)])
"""


@pytest.mark.parametrize(("setting", "is_there"), [("on", True), ("off", False), ("auto", False)])
def test_the_compiler_is_imported_where_it_is_wanted(setting, is_there):
    found = subprocess.run([sys.executable, "-c", PROGRAM, setting], capture_output=True, text=True, check=True)
    assert found.stdout == f"{is_there} True\n"


def test_a_compiler_that_cannot_be_imported_is_told_by_whoever_uses_it(monkeypatch, capfd):
    monkeypatch.setattr(compiler, "COMPILER", "torch._no_such_compiler")
    with imported_meanwhile(Training(compile="on"), torch.device("cpu")):
        pass
    assert capfd.readouterr() == ("", "")


def test_an_error_of_the_body_comes_through():
    with pytest.raises(KeyError), imported_meanwhile(Training(compile="off"), torch.device("cpu")):
        raise KeyError


def test_compiling_is_the_default_on_cuda_alone():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for pays, on_cuda in ((True, True), (False, False)):
        assert [compiles(way, device, pays) for way in ("on", "off", "auto") for device in (cuda, cpu)] == [
            True, True, False, False, on_cuda, False]  # fmt: skip
