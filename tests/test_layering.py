"""The architecture is held by tests: who imports whom, and what a file of the model may not do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "latemask"
FILES = sorted(PACKAGE.rglob("*.py"))
MODEL = sorted((PACKAGE / "model").glob("*.py"))

MODEL_MAY_IMPORT = {"__future__", "collections", "dataclasses", "functools", "math", "typing", "jaxtyping", "torch",
                    "latemask"}  # fmt: skip
"""No files, no environment, no clock, no console: what a model computes depends on its weights and its input."""


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_by(path: Path) -> set[str]:
    """Dotted names of every module (and of every name taken from one)."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_go_one_way():
    program = "from importlinter.cli import lint_imports_command as lint; lint()"
    linted = subprocess.run([sys.executable, "-c", program, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert "3 kept, 0 broken" in linted.stdout


TORCHLESS = ["latemask", "latemask.recipes", "latemask.counts", "latemask.cards", "latemask.text.store",
             "latemask.report.plots", "latemask.report.page", "latemask.__main__"]  # fmt: skip


@pytest.mark.parametrize("module", TORCHLESS)
def test_words_text_and_report_start_without_torch(module):
    program = f"import sys, {module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize("path", MODEL, ids=name_of)
def test_the_model_only_computes(path):
    imported = imported_by(path)
    assert {name.split(".")[0] for name in imported} <= MODEL_MAY_IMPORT
    assert not [name for name in imported if name.startswith("torch.distributed")]
    own = {name.split(".")[1] for name in imported if name.startswith("latemask")}
    assert own <= {"model", "kernels", "batch", "config", "joins", "errors"}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("print", "open", "input", "__import__", "exec", "eval")
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in ("torch.distributed", "torch.save", "torch.load")


@pytest.mark.parametrize("path", MODEL, ids=name_of)
def test_the_model_takes_no_loose_keywords(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            assert node.args.kwarg is None, f"{name_of(path)}:{node.lineno}"


@pytest.mark.parametrize("stem", ["attention", "stack", "encoder", "heads"])
def test_the_network_has_never_heard_of_masked_tokens(stem):
    objective = {"mask", "masked", "n_masked", "mask_vector", "filler", "joins", "Join", "Masking", "Batch"}
    for node in ast.walk(tree_of(PACKAGE / "model" / f"{stem}.py")):
        assert not objective & {getattr(node, field, None) for field in ("id", "attr", "arg", "name")}


@pytest.mark.parametrize("path", MODEL, ids=name_of)
def test_no_recipe_is_named_in_the_model(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.If | ast.IfExp | ast.Compare | ast.Match):
            assert "recipe" not in ast.unparse(getattr(node, "test", node))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_short_and_opens_with_its_idea(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 450
    if text.strip():
        assert ast.get_docstring(tree_of(path)), "a file opens by saying its idea"
    assert path.stem not in ("utils", "util", "helpers", "misc", "common")


def test_the_one_forward_pass_fits_on_a_screen():
    [predict] = [node for node in ast.walk(tree_of(PACKAGE / "model" / "pretrainer.py"))
                 if isinstance(node, ast.FunctionDef) and node.name == "predict"]  # fmt: skip
    assert predict.end_lineno - predict.lineno <= 30
