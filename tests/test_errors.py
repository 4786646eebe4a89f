"""Every error that can reach a user has one form: where, what was found, what was wanted, what to do."""

from __future__ import annotations

import ast
import dataclasses
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from latemask.__main__ import COMMANDS, named
from latemask.cli.pretrain import PretrainOptions
from latemask.cli.sweep import SweepOptions
from latemask.config import Decoder, Masking, Run, Shape, Specials, Training
from latemask.downstream.settings import Settings
from latemask.errors import Refusal
from latemask.text.blocks import Reading
from latemask.training.loop import Diverged

PACKAGE = Path(__file__).parents[1] / "src" / "latemask"
FILES = sorted(PACKAGE.rglob("*.py"))

NO_REFUSAL = {
    ("__init__.py", "__getattr__"): "AttributeError",  # Python's own protocol
    ("hf/__init__.py", "__getattr__"): "AttributeError",
    ("hf/modeling_latemask.py", "seats"): "ValueError",  # travels with exports, where there is no latemask
    ("kernels/linear_cross_entropy.py", "backward"): "RuntimeError",  # contracts between our own files
    ("downstream/finetune.py", "training"): "ValueError",
    ("feed/batches.py", "__init__"): "ValueError",
    ("downstream/examples.py", "_read"): "ValueError",  # the caller counts the row with this reason
    ("downstream/examples.py", "_number"): "_UnknownClass",
    ("demo.py", "train"): "KeyboardInterrupt",  # Ctrl-C, handed on
    ("training/graphs.py", "_capture"): "first",  # out of memory, which the loop tells
    ("training/guards.py", "hear"): "KeyboardInterrupt",
    ("downstream/runner.py", "_worker"): "SystemExit",  # it has printed its Refusal
    ("report/folders.py", "read_folders"): "left_out[0]",  # Refusals, made or met before
    ("training/journal.py", "_whole"): "_not_whole",
    ("training/journal.py", "read_checked"): "problem",
}
"""(File, function): what it raises beside refusals, and why no user meets it as a traceback."""

NOUNS = {
    "text", "input", "tokenizer", "standard input", "files", "model", "predictions", "labels", "questions", "train",
    "vectors", "command", "torchrun", "process", "from_transformers", "optimizer.safetensors", "a field without a name",
}  # fmt: skip
"""Where a Refusal has neither a file nor a field to name: what a person gave."""


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Each node with the name of the innermost function around it."""

    def walk(node: ast.AST, around: str) -> Iterator[tuple[str, ast.AST]]:
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else around
        for child in ast.iter_child_nodes(node):
            yield inside, child
            yield from walk(child, inside)

    return walk(tree, "")


def kind_of(node: ast.Raise) -> str:
    exception = node.exc
    exception = exception.body if isinstance(exception, ast.IfExp) else exception
    return ast.unparse(exception.func if isinstance(exception, ast.Call) else exception)  # type: ignore[arg-type]


def is_caught_beside(tree: ast.Module, node: ast.Raise, kind: str) -> bool:
    """Whether the function that holds it catches it: a ``raise`` inside a ``try`` that names its kind."""
    for holder in ast.walk(tree):
        if isinstance(holder, ast.Try) and any(node is inner for part in holder.body for inner in ast.walk(part)):
            for handler in holder.handlers:
                if handler.type is not None and kind in ast.unparse(handler.type):
                    return True
    return False


def test_everything_that_is_raised_is_a_refusal_or_meets_no_user():
    odd, used = [], set()
    for path in FILES:
        tree, name = ast.parse(path.read_text(encoding="utf-8")), name_of(path)
        for function, node in functions(tree):
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            kind = kind_of(node)
            if kind in ("Refusal", "Diverged") or kind.endswith(".refusal") or is_caught_beside(tree, node, kind):
                continue
            if NO_REFUSAL.get((name, function)) == kind:
                used.add((name, function))
            else:
                odd.append(f"{name}:{node.lineno} {function} raises {kind}")
    assert not odd, "\n".join(odd)
    assert used == NO_REFUSAL.keys(), "entries that nothing raises any more"


def refusals() -> list[tuple[str, ast.Call, set[str]]]:
    """Every call that makes a Refusal, and every rule that would (``require``), with its file and line, and the names
    that the caller of its function gives things."""
    found = []
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        given = {
            inner: {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Refusal", "Diverged", "require"):
                found.append((f"{name_of(path)}:{node.lineno}", node, given.get(node, set())))
    return found


def parts_of(call: ast.Call) -> list[ast.expr]:
    return call.args[1:] if ast.unparse(call.func) == "require" else call.args


def written(node: ast.expr) -> str:
    """What is written literally in an expression; § for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part) for part in node.values)
    return "§"


def test_every_refusal_says_where_found_and_wanted():
    calls = refusals()
    assert len(calls) > 250, "the walk sees them"
    for place, call, _ in calls:
        parts = parts_of(call)
        if any(isinstance(part, ast.Starred) for part in parts):
            continue
        assert not call.keywords, f"{place}: by place, as everywhere"
        assert 3 <= len(parts) <= 4, f"{place}: where, found, wanted and perhaps what to do"
        for number, part in enumerate(parts):
            for branch in (part.body, part.orelse) if isinstance(part, ast.IfExp) else (part,):
                text = written(branch)
                assert text or number == 3, f"{place}: an empty part"
                assert text == text.strip(), f"{place}: {text!r}"
                assert "\n" not in text, f"{place}: a Refusal is one line"
                assert not text.endswith("!"), f"{place}: {text!r}"
                assert not text.endswith(".") or text.endswith("..."), f"{place}: {text!r} ends the sentence itself"


def options() -> set[str]:
    """Every flag of every command."""
    classes = [named(command.options) for command in COMMANDS if command.options]
    classes += [PretrainOptions, SweepOptions, Reading]
    names = {field.name for one in classes for field in dataclasses.fields(one)}
    return {f"--{name.replace('_', '-')}" for name in names} | {"--debug"}


def fields() -> set[str]:
    """Every dotted name of a Run, and of its parts."""
    parts = {"shape": Shape, "decoder": Decoder, "masking": Masking, "training": Training, "shape.specials": Specials}
    dotted = {f"{part}.{field.name}" for part, one in parts.items() for field in dataclasses.fields(one)}
    return dotted | set(parts) | {field.name for field in dataclasses.fields(Run)}


def settings() -> set[str]:
    """Numbers of one fine-tuning."""
    return {field.name for field in dataclasses.fields(Settings)}


def test_where_is_a_flag_a_field_or_a_file():
    flags, dotted, unknown = options(), fields(), []
    commands = {command.name for command in COMMANDS}
    for place, call, given in refusals():
        where = parts_of(call)[0]
        text = written(where)
        if text.startswith("§") or isinstance(where, ast.Starred):  # a path, a name or a field that is filled in
            continue
        for one in re.split(r", | or ", text):
            name = one.split(":")[0]
            first = name.split()[0]
            filled = "§" in one and one.split("§")[0] in ("--", "shape.", "decoder.", "training.", "hub:", "process ")
            field = first in flags | dotted or name.endswith(".json") or first.split(".")[0] in given
            if not (filled or field or name in NOUNS | commands or name.replace(" ", "_") in given | settings()):
                unknown.append(f"{place}: {one!r}")
    assert not unknown, "\n".join(unknown)


def test_a_refusal_says_where_found_wanted_and_what_to_do():
    assert str(Refusal("a.txt:3", "0xFF", "UTF-8", "Try --invalid replace")) == (
        "a.txt:3: found 0xFF; wanted UTF-8. Try --invalid replace"
    )
    assert str(Refusal("a.txt", "nothing", "text")) == "a.txt: found nothing; wanted text"


@pytest.mark.parametrize("kind", [Refusal, Diverged])
def test_a_refusal_crosses_processes_whole(kind):
    refusal = kind("a.txt:3", "0xFF", "UTF-8", "Try --invalid replace")
    copy = pickle.loads(pickle.dumps(refusal))
    assert type(copy) is kind
    assert vars(copy) == vars(refusal)
    assert str(copy) == str(refusal)
