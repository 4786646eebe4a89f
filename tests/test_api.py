"""The names that `import latemask` offers, and the examples in their docstrings, run as they stand."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
from pathlib import Path

import pytest
import torch

import latemask
import latemask.hf
from latemask.text.prepare import prepare
from trained import TEXT, byte_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the prepared data that the examples name, and the run that the package's example makes."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "text.txt").write_text("\n\n".join(f"{TEXT} Page {number}." for number in range(150)))
    prepare([folder / "text.txt"], byte_level(), folder / "data" / "en", valid_share=0.2)
    with contextlib.chdir(folder):
        assert run_examples(latemask) > 5
    return folder


@pytest.mark.parametrize("name", ["load_encoder", "load_pretrained", "encode"])
def test_examples_run_as_they_stand(name, folder):
    with contextlib.chdir(folder):
        assert run_examples(getattr(latemask, name)) > 0


@pytest.mark.slow
def test_the_example_of_export_runs_as_it_stands(folder):
    with contextlib.chdir(folder):
        assert run_examples(latemask.hf.export) > 0


def run_examples(documented: object) -> int:
    """How many examples were tried; fails at the first that does not say what it should."""
    names = {"latemask": latemask, "torch": torch}
    tests = doctest.DocTestFinder(recurse=False).find(documented, "example", module=False, globs=names)
    said: list[str] = []
    runner = doctest.DocTestRunner()
    for test in tests:
        result = runner.run(test, out=said.append)
        assert result.failed == 0, "".join(said)
    return sum(len(test.examples) for test in tests)


@pytest.mark.parametrize("package", [latemask, latemask.hf], ids=lambda package: package.__name__)
def test_every_name_is_there_and_documented(package):
    for name in package.__all__:
        value = getattr(package, name)
        assert inspect.getdoc(value), name
        assert getattr(importlib.import_module(value.__module__), name) is value
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name


def test_the_package_offers_ten_names():
    options, calls = ["EvaluateOptions", "FinetuneOptions", "Run"], ["encode", "evaluate", "finetune"]
    assert latemask.__all__ == [*options, *calls, "load_encoder", "load_pretrained", "pretrain", "recipe"]
    assert set(latemask.__all__) <= set(dir(latemask))
