"""Every error that can reach a user has one form: where, what was found, what was wanted, what to do."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import functools
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from latemask.__main__ import COMMANDS, named
from latemask.cli.pretrain import PretrainOptions
from latemask.cli.sweep import SweepOptions
from latemask.config import Decoder, Masking, Run, Shape, Specials, Training
from latemask.downstream.claims import read_results
from latemask.downstream.saved import FACTS, HEAD, read_facts
from latemask.downstream.settings import Settings
from latemask.downstream.squad import read_squad
from latemask.errors import Refusal, kind_of, unreadable
from latemask.hf.loading import load_encoder, load_masked_model, load_tokenizer_of
from latemask.out_of_memory import OutOfMemory
from latemask.text.blocks import Reading
from latemask.text.store import open_store
from latemask.training.checkpoint import fault, read_run, read_state
from latemask.training.loop import Diverged
from samples import small
from trained import byte_level, verified_here, write_run

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
    ("downstream/stepper.py", "_captured"): "first",  # the same, which the command tells
    ("training/guards.py", "hear"): "KeyboardInterrupt",
    ("downstream/runner.py", "_worker"): "SystemExit",  # it has printed its Refusal
    ("report/folders.py", "read_folders"): "left_out[0]",  # Refusals, made or met before
    ("training/journal.py", "_whole"): "_not_whole",
    ("training/journal.py", "read_checked"): "problem",
}
"""(File, function): what it raises beside refusals, and why no user meets it as a traceback."""

KINDS = ("Refusal", "Diverged", "OutOfMemory")

NOUNS = {
    "text", "input", "tokenizer", "standard input", "files", "model", "predictions", "labels", "questions", "train",
    "vectors", "command", "torchrun", "process", "from_transformers", "optimizer.safetensors", "a field without a name",
}  # fmt: skip
"""Where a Refusal has neither a file nor a field to name: what a person gave."""


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Each node with the name of the innermost function around it."""

    def walk(node: ast.AST, around: str) -> Iterator[tuple[str, ast.AST]]:
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else around
        for child in ast.iter_child_nodes(node):
            yield inside, child
            yield from walk(child, inside)

    return walk(tree, "")


def raised(node: ast.Raise) -> str:
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
        tree, name = tree_of(path), name_of(path)
        for function, node in functions(tree):
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            kind = raised(node)
            if kind in KINDS or kind.endswith(".refusal") or is_caught_beside(tree, node, kind):
                continue
            if NO_REFUSAL.get((name, function)) == kind:
                used.add((name, function))
            else:
                odd.append(f"{name}:{node.lineno} {function} raises {kind}")
    assert not odd, "\n".join(odd)
    assert used == NO_REFUSAL.keys(), "entries that nothing raises any more"


@functools.cache
def refusals() -> list[tuple[str, ast.Call, set[str]]]:
    """Every call that makes a Refusal, and every rule that would (``require``), with its file and line, and the names
    that the caller of its function gives things."""
    found = []
    for path in FILES:
        tree = tree_of(path)
        given = {
            inner: {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (*KINDS, "require"):
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


@pytest.mark.parametrize("kind", [Refusal, Diverged, OutOfMemory])
def test_a_refusal_crosses_processes_whole(kind):
    refusal = kind("a.txt:3", "0xFF", "UTF-8", "Try --invalid replace")
    copy = pickle.loads(pickle.dumps(refusal))
    assert type(copy) is kind
    assert vars(copy) == vars(refusal)
    assert str(copy) == str(refusal)


PYTHON = re.compile(
    r"\w(Error|Exception)\b|NoneType|<class|has no attribute|subscriptable|argument (of|after)|invalid literal"
    r"|unhashable|indices must|codec can't|recursion|set_int_max_str_digits|__init__|char \d"
)
"""What Python says of its own, which tells a person nothing of a file."""


def names_of_errors(tree: ast.Module) -> Iterator[int]:
    """Lines that put the name of a caught error's class, or its ``repr``, into a text."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        for node in ast.walk(handler):
            is_formatted = isinstance(node, ast.FormattedValue)
            if is_formatted and f"type({handler.name}).__name__" in ast.unparse(node.value):
                yield node.lineno
            if is_formatted and ast.unparse(node.value) == handler.name and node.conversion == ord("r"):
                yield node.lineno


def test_no_message_holds_the_name_of_pythons_error():
    benchmarks = sorted((PACKAGE.parents[1] / "benchmarks").glob("*.py"))
    assert len(benchmarks) > 10
    odd = [f"{path.name}:{line}" for path in (*FILES, *benchmarks)
           for line in names_of_errors(tree_of(path))]  # fmt: skip
    assert not odd, odd
    seen = "try: pass\nexcept OSError as e: print(f'{type(e).__name__}')\nexcept KeyError as e: print(f'{e!r}')"
    assert list(names_of_errors(ast.parse(seen))) == [2, 3]


BROKEN = {
    "empty": (b"", "broken JSON (Expecting value, column 1)"),
    "cut": (b'{"a":', "broken JSON (Expecting value, column 6)"),
    "cut in line 2": (b'{"a": 1,\n"b"}', "line 2 column 4)"),
    "bytes": (b'{"a": "\xff"}', "bytes that are not UTF-8 (from byte 7 on)"),
    "deep": (b"[" * 100_000, "JSON nested too deeply"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "JSON with a number of too many digits"),
    "list": (b"[]", "a list"),
    "null": (b"null", "null"),
    "number": (b"3", "a number"),
    "text": (b'"a"', "a text"),
    "truth": (b"true", "true or false"),
}
"""Content of a file that ought to hold a JSON object, and what is said of it."""


def reads_object(path: Path) -> None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(path, unreadable(error), "an object") from None
    if not isinstance(found, dict):
        raise Refusal(path, kind_of(found), "an object")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and its encoder as transformers has it."""
    from latemask.hf import export

    folder = tmp_path_factory.mktemp("models")
    write_run(folder / "run", small("mlm", positions="absolute"), byte_level())
    with verified_here():
        export(folder / "run", folder / "export", kind="masked-lm")
    (folder / "export" / "SHA256SUMS").unlink()
    return folder


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_is_said_in_words(content, models, data, tmp_path):
    broken, said = BROKEN[content]
    step = next((models / "run").glob("step-*"))
    readers: list[tuple[str, Path | None, Callable[[Path], object]]] = [
        ("a.json", None, reads_object),
        ("store.json", data, lambda path: open_store(path.parent)),
        ("run.json", step, lambda path: read_run(path.parent)),
        ("state.json", step, lambda path: read_state(path.parent)),
        (FACTS, None, lambda path: read_facts(path.parent)),
        ("a.json", None, read_squad),
        *((name, models / "export", lambda path: load_tokenizer_of(path.parent))
          for name in ("config.json", "tokenizer.json", "tokenizer_config.json")),
    ]  # fmt: skip
    for number, (name, whole, read) in enumerate(readers):
        folder = tmp_path / str(number)
        folder.mkdir() if whole is None else shutil.copytree(whole, folder)
        (folder / HEAD).write_bytes(b"")
        (folder / name).write_bytes(broken)
        with pytest.raises(Refusal) as refused:
            read(folder / name)
        message = str(refused.value)
        assert name in message or folder.name in message
        assert not PYTHON.search(message), message
        assert said in message or read is read_squad or name == "run.json", message
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.json").write_bytes(broken)
    problem = fault(tmp_path / "state")
    assert problem is not None
    assert said in problem
    if said.startswith(("bytes", "broken", "JSON")):
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "a.json").write_bytes(broken)
        with pytest.raises(Refusal, match=re.escape(said)):
            read_results(tmp_path / "results")


def test_what_json_cannot_hold_is_not_called_a_number():
    assert [kind_of(value) for value in (3, 0.5, True, b"a", datetime.date(2026, 1, 1))] == [
        "a number", "a number", "true or false", "a value of another kind", "a value of another kind"]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "said"), [
    ("hidden_size", "x", "hidden_size = 'x' in config.json"), ("num_hidden_layers", [1], "num_hidden_layers = [1]"),
    ("num_attention_heads", 0, "config.json"), ("architectures", 3, "config.json"), ("hidden_act", "zzz", "zzz"),
    ("pad_token_id", "x", "pad_token_id = 'x'"), ("model_type", 3, "model type"),
])  # fmt: skip
def test_a_field_that_transformers_stumbles_over_is_said_in_words(field, value, said, models, tmp_path):
    folder = shutil.copytree(models / "export", tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(Refusal) as refused:
        load_masked_model(folder)
    assert said in str(refused.value)
    assert not PYTHON.search(str(refused.value)), str(refused.value)


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_broken_tensors_are_said_with_their_file(content, models, tmp_path):
    folder = shutil.copytree(models / "export", tmp_path / "export")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(Refusal, match=r"export/model\.safetensors: found a broken file \("):
        load_encoder(folder)
