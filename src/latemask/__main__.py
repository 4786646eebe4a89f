"""The command line: ``latemask COMMAND ...``. Only the code of the command that is asked for is imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from latemask.errors import Refusal
from latemask.out_of_memory import out_of_memory_is_refused

DEBUG = "LATEMASK_DEBUG"
REFUSED, FAILED, INTERRUPTED = 2, 1, 130
"""Exit statuses: bad input, a system error such as a full disk, Ctrl-C."""


@dataclass(frozen=True)
class Command:
    """One command. ``run`` takes the parsed ``options``, or the raw arguments where ``options`` is empty; both are
    ``module:name``, imported when the command is asked for."""

    name: str
    summary: str
    run: str
    options: str = ""
    positional: tuple[str, ...] = ()
    """Fields of ``options`` that are given without a flag."""


COMMANDS = (
    Command("demo", "three encoders on real prose, on a CPU, in minutes",
            "latemask.demo:run_demo", "latemask.demo:DemoOptions"),
    Command("tokenizer", "train a tokenizer on your text",
            "latemask.text.tokenizer:run_tokenizer", "latemask.text.tokenizer:TokenizerOptions"),
    Command("prepare", "turn your text into tokens on disk",
            "latemask.text.prepare:run_prepare", "latemask.text.prepare:PrepareOptions"),
    Command("recipes", "a table of every recipe",
            "latemask.cli.recipes:run_recipes", "latemask.cli.recipes:RecipesOptions"),
    Command("cost", "parameters, FLOPs per token, ratio to MLM, memory, GPU-hours of a recipe",
            "latemask.cli.cost:run_cost"),
    Command("plan", "the recipe for your text and GPU-hours, and what to expect",
            "latemask.study.plan:run_plan", "latemask.study.plan:PlanOptions"),
    Command("pretrain", "pretrain an encoder, on one process or many; resume", "latemask.cli.pretrain:run_pretrain"),
    Command("sweep", "pretrain a recipe at several values of a field, with the trend", "latemask.cli.sweep:run_sweep"),
    Command("fill", "predict what stands behind each <mask> of a text",
            "latemask.hf:run_fill", "latemask.hf:FillOptions", ("text",)),
    Command("finetune", "fine-tune on GLUE, SQuAD 2.0 or a task of your own",
            "latemask.downstream.runner:run_finetune", "latemask.downstream.options:FinetuneOptions", ("model",)),
    Command("evaluate", "minimal pairs, masked loss, similarity; no training",
            "latemask.downstream.evaluation:run_evaluate", "latemask.downstream.options:EvaluateOptions", ("model",)),
    Command("rank", "effective rank of every layer, with and without [MASK]",
            "latemask.cli.rank:run_rank", "latemask.cli.rank:RankOptions", ("model",)),
    Command("theory", "MAE-LM's section 2.2 and appendix A, measured on a model",
            "latemask.cli.theory:run_theory", "latemask.cli.theory:TheoryOptions", ("model",)),
    Command("export", "write a run as a folder that transformers loads",
            "latemask.hf:run_export", "latemask.hf:ExportOptions", ("model",)),
    Command("report", "runs side by side on one page",
            "latemask.report.page:run_report", "latemask.report.page:ReportOptions", ("runs",)),
    Command("bench", "time training steps, ours and transformers', beside the goals",
            "latemask.bench:run_bench", "latemask.bench:BenchOptions"),
    Command("doctor", "card, versions, kernels in use, a short self-test",
            "latemask.cli.doctor:run_doctor", "latemask.cli.doctor:DoctorOptions"),
)  # fmt: skip


def overview() -> str:
    """What ``latemask --help`` prints."""
    lines = ["usage: latemask COMMAND [OPTIONS]", "", importlib.metadata.metadata("latemask")["Summary"], ""]
    lines += [f"  {command.name:<10}{command.summary}" for command in COMMANDS]
    lines += ["", "latemask COMMAND --help lists a command's options; latemask --version; --debug shows tracebacks.",
              "On several GPUs: torchrun --nproc-per-node 8 -m latemask pretrain ..."]  # fmt: skip
    return "\n".join(lines)


def dispatch(arguments: Sequence[str]) -> int | None:
    """Run the command that ``arguments`` name; its exit status. Raises ``Refusal`` for an unknown command."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        print(overview())
        return None
    if name == "--version":
        print(f"latemask {importlib.metadata.version('latemask')}")
        return None
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        import difflib

        known = [command.name for command in COMMANDS]
        close = difflib.get_close_matches(name, known, n=3) or known
        raise Refusal("command", repr(name), f"one of {', '.join(close)}", "`latemask --help` lists all commands")
    with out_of_memory_is_refused(name):  # where the command has no better advice
        if not command.options:
            return named(command.run)(rest)
        from latemask.cli.options import parse

        options = parse(named(command.options), rest, prog=f"latemask {name}", positional=command.positional)
        return named(command.run)(options)


def named(place: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def main() -> None:
    """Entry point of ``latemask`` and ``python -m latemask``: one line for what a user can mend, then exit."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1 or os.environ.get(DEBUG, "0") not in ("", "0")
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  None where the caller closed it
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file name may hold what the terminal's encoding does not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.exit(dispatch(arguments))
    except Refusal as refusal:
        fail(str(refusal), REFUSED, debug)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        fail(named, FAILED, debug)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not break into the exit
        fail("interrupted", INTERRUPTED, debug)


def fail(message: str, status: int, debug: bool) -> None:
    """Print one line (red on a terminal) and exit; with ``debug`` the exception goes on instead."""
    if debug:
        raise
    rank = f" (rank {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() and "NO_COLOR" not in os.environ else ("", "")
    print(f"{red}latemask{rank}: {message}{plain}", file=sys.stderr, flush=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
