"""The command line: quick to answer, every field a flag, one line for what a user can mend, exit statuses."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from latemask import __main__ as command_line
from latemask.cli import pretrain
from latemask.cli.options import FROM_DATA, PARTS, parse, parse_run
from latemask.config import Run, replace
from latemask.errors import Refusal
from latemask.joins import DECODER, Join
from latemask.recipes import names, recipe
from latemask.text.prepare import prepare
from samples import small
from trained import TEXT, byte_level, write_run
from training_support import write_store


@dataclass(frozen=True)
class Nothing:
    """No options beside the run's."""


def overridden(name: str, *arguments: str) -> Run:
    return parse_run(Nothing, recipe(name), arguments, prog="test")[1]


def latemask(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "latemask", *arguments], capture_output=True, text=True,
                          env={**os.environ, **environment})  # fmt: skip


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["recipes"], ["cost", "mlm_tiny"],
                                       ["pretrain", "mlm_tiny", "--help"]])  # fmt: skip
def test_answers_without_loading_what_is_heavy(arguments):
    assert_light(arguments, None)


OWN = ["--task", "own", "--train", "train.csv", "--dev", "dev.csv"]


@pytest.mark.parametrize(("arguments", "said"), [
    (["finetune", "run", *OWN, "--data", ".", "--epochs", "-1"], "epochs: found -1"),
    (["finetune", "run", *OWN, "--data", ".", "--dropout", "1"], "dropout: found 1"),
    (["finetune", "run", *OWN, "--data", "nowhere"], "nowhere: found no such folder"),
    (["finetune", "run", *OWN, "--data", "."], "train.csv: found no such file"),
    (["finetune", "run", "--task", "rte", "rtex", "--data", "."], "--task: found 'rtex'"),
    (["finetune", "run", "--task", "squad2", "--data", "."], "train-v2.0.json: found no such file"),
    (["finetune", "./run", *OWN, "--data", "."], "./run: found no such folder"),
    (["evaluate", "./run", "--suite", "masked-loss", "--data", "."], "./run: found no such folder"),
    (["evaluate", "run", "--suite", "blimp", "--data", "nowhere"], "--data: found nowhere"),
    (["fill", "a <mask>", "--model", "run", "--top", "-3"], "--top: found -3"),
    (["fill", "a <mask>", "--model", "./run"], "./run: found no such folder"),
    (["export", "./run", "--out", "out"], "./run: found no such folder"),
])  # fmt: skip
def test_what_a_path_or_an_option_tells_is_refused_without_loading_what_is_heavy(arguments, said, tmp_path):
    assert said in assert_light(arguments, 2, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with three runs, data prepared with their tokenizer and with another, a fine-tuned model that lacks its
    head, and tables of the user's own."""
    folder = tmp_path_factory.mktemp("here")
    for system in ("mae_lm", "mlm", "decoder_causal_cross"):
        write_run(folder / "runs" / system, small(system), byte_level())
    byte_level().save(folder / "tok")
    (folder / "text.txt").write_text("\n\n".join(f"{number} {TEXT}" for number in range(40)))
    prepare([folder / "text.txt"], folder / "tok", folder / "data", valid_share=0.5, workers=1)
    write_store(folder / "other")
    for name in ("train.csv", "dev.csv"):
        (folder / name).write_text("text,label\n" + "".join(f"the cat {number},{number % 2}\n" for number in range(8)))
    for name in ("empty.csv", "empty.txt"):
        (folder / name).write_text("")
    (folder / "pairs.jsonl").write_text('{"good": "a cat"}\n')
    (folder / "squad").mkdir()
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        (folder / "squad" / name).write_text("{}")
    (folder / "tuned").mkdir()
    (folder / "tuned" / "finetuned.json").write_text("{}")
    return folder


MAE, NEVER_MASKS = "runs/mae_lm", "runs/decoder_causal_cross"
FILES = ["--task", "own", "--data", ".", "--dev", "dev.csv"]
RATES = ["--vary", "masking.rate=.1,.2"]


@pytest.mark.parametrize(("arguments", "said"), [
    (["fill", "no mask", "--model", MAE], "text: found 'no mask'; wanted at least one <mask>"),
    (["fill", "a [MASK]", "--model", MAE], "text: found 'a [MASK]'; wanted at least one <mask>"),
    (["fill", "<mask>" + " cat" * 99, "--model", MAE], "wanted at most 36. Shorten the text"),
    (["fill", "a \udce9 <mask>", "--model", MAE], "text: found a lone surrogate"),
    (["fill", "a <mask>", "--model", NEVER_MASKS], "whose decoder rewrites the row"),
    (["fill", "a <mask>", "--model", "runs"], "runs: found no checkpoint and no config.json"),
    *((given, said) for study in ("rank", "theory") for given, said in [
        ([study, MAE, "--data", "nowhere"], "nowhere: found no such file"),
        ([study, MAE, "--data", "empty.txt"], "empty.txt: found no text"),
        ([study, MAE, "--data", "data", "--tau", "2"], "--tau: found 2.0"),
        ([study, MAE, "--data", "data", "--tokens", "0"], "--tokens: found 0"),
        ([study, MAE, "--data", "data", "--rate", "1"], "--rate: found 1.0"),
        ([study, MAE, "--data", "data", "--rate", ".99"], "--rate: found 0.99, 36 tokens of a row of 36"),
        ([study, MAE, "--data", "data", "--sees-masks", "yes"], "--sees-masks: found yes for mae_lm_tiny"),
        ([study, MAE, "--data", "data", "--specials", "some"], "--specials"),
        ([study, MAE, "--data", "data", "--device", "gpu"], "--device: found 'gpu'; wanted cpu, cuda, "),
        ([study, MAE, "--data", "data", "--out", "."], "--out: found the folder ."),
        ([study, "runs", "--data", "data"], "runs: found no checkpoint and no config.json"),
    ]),
    (["export", MAE, "--out", "tok"], "tok: found something already there"),
    (["export", "runs", "--out", "out"], "runs: found no checkpoint and no config.json"),
    (["export", NEVER_MASKS, "--out", "out", "--kind", "masked-lm"], "whose decoder rewrites the row"),
    (["finetune", "runs", *FILES, "--train", "train.csv"], "runs: found no checkpoint and no config.json"),
    (["finetune", MAE, *FILES, "--train", "empty.csv"], "empty.csv: found no row with text, label"),
    (["finetune", MAE, *FILES, "--train", "train.csv", "--label", "mood"], "train.csv:1: found columns text, label"),
    (["finetune", MAE, *FILES, "--train", "train.csv", "--out", "dev.csv"], "dev.csv: found a file; wanted a folder"),
    (["finetune", MAE, "--task", "squad2", "--data", "squad"], "found another layout: the whole has no field data"),
    (["finetune", MAE, "--task", "squad2", "--data", "squad", "--null-threshold", "inf"], "--null-threshold: "),
    (["evaluate", "runs", "--suite", "masked-loss", "--data", "data"], "runs: found no checkpoint and no config.json"),
    (["evaluate", MAE, "--suite", "masked-loss", "--data", "nowhere"], "nowhere: found no such file"),
    (["evaluate", MAE, "--suite", "masked-loss", "--data", "empty.txt"], "empty.txt: found no text"),
    (["evaluate", MAE, "--suite", "masked-loss", "--data", "data", "--rate", "2"], "--rate: found 2.0"),
    (["evaluate", MAE, "--suite", "masked-loss", "--data", "data", "--row-tokens", "99"], "--row-tokens: found 99"),
    (["evaluate", MAE, "--suite", "masked-loss", "--data", "other"], "another tokenizer than the model's"),
    (["evaluate", NEVER_MASKS, "--suite", "masked-loss", "--data", "data"], "whose decoder rewrites the row"),
    (["evaluate", MAE, "--suite", "blimp", "--data", "pairs.jsonl"], "pairs.jsonl: found no row with sentence_good"),
    (["evaluate", MAE, "--suite", "similarity", "--data", "dev.csv", "--task", "own"], "dev.csv:1: found columns"),
    (["evaluate", MAE, "--suite", "finetuned", "--data", "dev.csv"], "runs/mae_lm: found no finetuned.json"),
    (["evaluate", "tuned", "--suite", "finetuned", "--data", "dev.csv"], "tuned: found no head.safetensors"),
    (["pretrain", "mlm_tiny", "--data", "nowhere", "--out", "out"], "nowhere: found no store.json"),
    (["pretrain", "mlm_tiny", "--data", "data", "--out", MAE], "runs/mae_lm: found a run already"),
    (["pretrain", "mlm_tiny", "--data", "data", "--out", "tok"], "tok: found other files (tokenizer.json)"),
    (["pretrain", "mlm_tiny", "--data", "data", "--out", "dev.csv"], "dev.csv: found a file; wanted a folder"),
    (["pretrain", "mlm_tiny", "--data", "data", "--out", "dev.csv/a"], "dev.csv, a file; wanted a folder"),
    (["pretrain", "mlm_tiny", "--data", "data", "--out", "out", "--overwrite", "--resume-if-present"], "--overwrite: "),
    (["pretrain", "mlm_tiny", "--data", "data", "--out", "out", "--shape.width", "1000000"], "this machine's memory"),
    (["pretrain", "mlm_tiny", "--data", "data", "--out", MAE, "--resume-if-present"], "runs/mae_lm/step-0000003"),
    (["pretrain", "--resume", "nowhere"], "nowhere: found no step folder"),
    (["pretrain", "--resume", "runs"], "runs: found no step folder"),
    (["pretrain", "--resume", MAE, "--data", "data"], "wanted the data that runs/mae_lm/step-0000003 was trained on"),
    (["sweep", "mlm_tiny", *RATES, "--data", "nowhere", "--out", "out"], "nowhere: found no store.json"),
    (["sweep", "mlm_tiny", "--vary", "masking.rat=1", "--data", "data", "--out", "out"], "masking.rat: found no such"),
    (["sweep", "mlm_tiny", *RATES, "--data", "data", "--out", "dev.csv"], "dev.csv: found a file; wanted a folder"),
    (["doctor", "--data", "nowhere"], "nowhere: found no store.json"),
    (["bench", "--only", "some"], "--only: found some; wanted some of: plain mlm; "),
    (["bench", "--out", "."], "--out: found the folder ."),
])  # fmt: skip
def test_what_needs_no_torch_is_refused_before_torch_is_loaded(arguments, said, here):
    before = sorted(here.rglob("*"))
    assert said in assert_light(arguments, 2, cwd=here, heavy=("torch", "transformers"))
    assert sorted(here.rglob("*")) == before


def assert_light(
    arguments: list[str],
    status: int | None,
    cwd: Path | None = None,
    heavy: tuple[str, ...] = ("torch", "transformers", "tokenizers", "pyarrow", "matplotlib"),
) -> str:
    """What the command said to standard error."""
    program = (
        "import sys; from latemask.__main__ import main\n"
        f"sys.argv = ['latemask', *{arguments}]\n"
        "try: main()\n"
        f"except SystemExit as stop: assert (stop.code or None) == {status}, stop.code\n"
        f"heavy = {set(heavy)} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=cwd)
    print(f"{arguments}: {time.perf_counter() - began:.2f} s")
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_overview_lists_every_command_and_each_has_its_code():
    text = command_line.overview()
    for command in command_line.COMMANDS:
        assert f"\n  {command.name} " in text
        assert latemask(command.name, "--help").returncode == 0, command.name


@pytest.mark.parametrize("name", ["mlm_tiny", "three_ml_cross_base", "gradual_large", "delta_small", "mlm_base_plus"])
def test_every_field_is_a_flag_whose_default_is_the_recipes_own(name):
    run = recipe(name)
    arguments = []
    for part in PARTS:
        for field in dataclasses.fields(getattr(run, part) or Nothing()):
            if field.name in FROM_DATA:
                continue
            value = getattr(getattr(run, part), field.name)
            words = map(str, value) if isinstance(value, tuple) else [str(value)]
            arguments += [f"--{part}.{field.name.replace('_', '-')}", *words]
    assert overridden(name) == run
    assert overridden(name, *arguments) == run


def test_overrides_reach_the_run():
    run = overridden("mae_lm_tiny", "--training.steps", "1000", "--masking.rate", ".5", "--shape.positions", "absolute",
                     "--masking.joins", "0:0:0.2", "decoder:0.2:1", "--training.micro-rows", "4", "--training.betas",
                     "0.8", "0.9", "--shape.isolate-documents", "True", "--decoder.sublayers", "self", "cross",
                     "--training.clip-norm", "None")  # fmt: skip
    assert run == replace(recipe("mae_lm_tiny"), {
        "training.steps": 1000, "masking.rate": 0.5, "shape.positions": "absolute",
        "masking.joins": (Join(0, 0, 0.2), Join(DECODER, 0.2, 1)), "training.micro_rows": 4,
        "training.betas": (0.8, 0.9), "shape.isolate_documents": True, "decoder.sublayers": ("self", "cross"),
        "training.clip_norm": None,
    })  # fmt: skip


@pytest.mark.parametrize(("arguments", "where"), [
    (["--masking.rate", "1.5"], "masking.rate"),
    (["--masking.joins", "soon"], "masking.joins"),
    (["--masking.joins", "9"], "masking.joins"),
    (["--shape.heads", "3"], "shape.heads"),
    (["--training.micro-rows", "65"], "training.micro_rows"),
])  # fmt: skip
def test_a_broken_rule_is_a_refusal_that_names_the_field(arguments, where):
    with pytest.raises(Refusal) as refused:
        overridden("mae_lm_tiny", *arguments)
    assert refused.value.where.startswith(where)


@pytest.mark.parametrize(("arguments", "said"), [
    (["--training.step", "5"], ["--training.step", "--training.steps"]),
    (["--training.steps", "many"], ["--training.steps", "many"]),
    (["--shape.norm", "middle"], ["--shape.norm", "middle", "post", "pre"]),
    (["--masking.filler", ".8", ".2"], ["--masking.filler", "3 values"]),
    (["--shape.vocabulary", "9"], ["--shape.vocabulary"]),
])  # fmt: skip
def test_unknown_and_ill_typed_flags_are_named_with_what_is_close(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        overridden("mlm_tiny", *arguments)
    assert stopped.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert all(word in message for word in said), message


@pytest.mark.parametrize("flag", ["--decoder.depth", "--decoder.depth=2", "--decoder.dept"])
def test_a_flag_of_a_part_that_the_recipe_has_not_names_the_recipes_with_one(flag, tmp_path):
    write_run(tmp_path, small("gradual"), byte_level())
    for arguments, name in ((["cost", "mlm_tiny"], "mlm_tiny"),
                            (["pretrain", "--resume", str(tmp_path)], "gradual_tiny")):  # fmt: skip
        with pytest.raises(Refusal) as refused:
            command_line.dispatch([*arguments, flag, "2"])
        assert str(refused.value).startswith(f"{flag.removesuffix('=2')}: found {name}, which has no decoder; wanted ")
        named = refused.value.wanted.removeprefix("a recipe with one, such as ").split(", ")
        assert named
        assert all(one.endswith("_tiny") and recipe(one).decoder for one in named)


def test_help_of_a_recipe_shows_its_numbers_and_the_docstrings(capsys):
    with pytest.raises(SystemExit) as stopped:
        overridden("three_ml_self_small", "--help")
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--masking.rate FLOAT Share of a row's tokens that is masked" in text
    assert "(default: 0.5)" in text
    assert "(default: decoder:0.0:1.0)" in text
    assert "--training.batch-rows INT Rows per update, over all processes. (default: 128)" in text


@pytest.mark.parametrize("command", ["tokenizer", "prepare", "report", "doctor", "sweep", "pretrain", "fill",
                                     "finetune", "evaluate", "cost", "plan"])  # fmt: skip
def test_no_help_shows_an_empty_default(command, capsys):
    with pytest.raises(SystemExit):
        command_line.dispatch([command, *(["mae_lm_tiny"] if command == "sweep" else []), "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "(default: )" not in said
    assert "(default: " in said or "(required)" in said
    for arguments in (["pretrain", "mae_lm_tiny", "--help"], ["cost", "mae_lm_tiny", "--help"]):
        with pytest.raises(SystemExit):
            command_line.dispatch(arguments)
        said = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "(default: )" not in said
        assert "(default: none)" in said


def test_positional_fields_and_switches():
    @dataclass(frozen=True)
    class Options:
        """What."""

        files: tuple[str, ...]
        """Files."""
        out: Path = Path("x")
        """Folder."""
        overwrite: bool = False
        """Replace."""

    options = parse(Options, ["a", "b", "--overwrite"], prog="test", positional=("files",))
    assert (options.files, options.out, options.overwrite) == (("a", "b"), Path("x"), True)
    with pytest.raises(SystemExit):
        parse(Options, ["a", "--no-overwrite"], prog="test", positional=("files",))


@pytest.mark.parametrize(("arguments", "wanted", "do"), [
    (["rank", "A", "B", "--data", "d"], "one MODEL and flags", "latemask report A B"),
    (["finetune", "A", "B", "--task", "rte", "--data", "d"], "one MODEL and flags", "latemask report A B"),
    (["cost", "mlm_tiny", "B"], "one RECIPE and flags", "latemask recipes"),
    (["pretrain", "mlm_tiny", "B"], "one RECIPE and flags", "latemask recipes"),
    (["sweep", "mlm_tiny", "--data", "D", "--out", "O", "--vary", "training.seed=1,2", "B"],
     "one RECIPE, a --vary for each field, and flags", "--vary A=1,2 --vary B=3,4"),
    (["fill", "a", "B", "--model", "x"], "one TEXT and flags", "in quotes"),
    (["report", "A", "--out", "x", "B"], "all RUNS in one place, and flags", ""),
    (["tokenizer", "a", "--out", "x", "B"], "all FILES in one place, and flags", ""),
    (["doctor", "B"], "flags alone", ""),
])  # fmt: skip
def test_one_argument_too_many_is_told_what_the_command_takes(arguments, wanted, do):
    with pytest.raises(Refusal) as refused:
        command_line.dispatch(arguments)
    assert (refused.value.where, refused.value.found) == (arguments[0], "B besides")
    assert refused.value.wanted == wanted
    assert do in refused.value.do
    assert bool(do) == bool(refused.value.do)


@pytest.mark.parametrize("arguments", [
    ["pretrain", "--resume", "runs"], ["fill", "a <mask>", "--model", "runs"], ["export", "runs", "--out", "o"],
    ["rank", "runs", "--data", "d"], ["finetune", "runs", "--task", "rte", "--data", "hub:"],
])  # fmt: skip
def test_a_folder_of_runs_given_for_a_run_is_refused_with_the_runs_in_it(arguments, tmp_path, monkeypatch):
    for name in "dbca":
        (tmp_path / "runs" / name / "step-0000002").mkdir(parents=True)
    (tmp_path / "runs" / "0" / "step-by-step").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal) as refused:
        command_line.dispatch(arguments)
    assert refused.value.where == "runs"
    assert refused.value.do == "Runs in it: runs/a, runs/b, runs/c and 1 more"


def test_a_refusal_is_one_line_and_status_2():
    done = latemask("pretrain", "mlm_tny", "--data", "x", "--out", "y")
    assert done.returncode == 2
    assert done.stderr.startswith("latemask: recipe: found 'mlm_tny'; wanted")
    assert "mlm_tiny" in done.stderr
    assert done.stderr.count("\n") == 1
    assert latemask("pretrian").returncode == 2
    assert "pretrain" in latemask("pretrian").stderr


def test_debug_shows_the_traceback_and_rank_is_named():
    wrong = ("cost", "no_such_recipe")
    assert "Traceback" in latemask(*wrong, "--debug").stderr
    assert "Traceback" in latemask(*wrong, LATEMASK_DEBUG="1").stderr
    assert latemask(*wrong, WORLD_SIZE="2", RANK="1").stderr.startswith("latemask (rank 1): ")


@pytest.mark.parametrize(("error", "status", "said"), [
    (KeyboardInterrupt(), 130, "interrupted"),
    (FileNotFoundError(2, "No such file or directory", "tok/x"), 1, "tok/x: No such file or directory"),
    (Refusal("data", "nothing", "text", "Prepare some"), 2, "data: found nothing; wanted text. Prepare some"),
])  # fmt: skip
def test_exit_statuses(error, status, said, monkeypatch, capsys):
    def broken(arguments):
        raise error

    monkeypatch.setattr(command_line, "dispatch", broken)
    monkeypatch.setattr(sys, "argv", ["latemask", "demo"])
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as stopped:
            command_line.main()
    finally:  # ignored after Ctrl-C, and every process that a later test starts would ignore it too
        signal.signal(signal.SIGINT, before)
    assert stopped.value.code == status
    assert capsys.readouterr().err == f"latemask: {said}\n"


def test_other_errors_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(command_line, "dispatch", lambda arguments: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        command_line.main()


def test_a_reader_that_leaves_early_gets_no_traceback():
    done = subprocess.run(f"{sys.executable} -m latemask recipes | head -1", shell=True, capture_output=True, text=True)
    assert done.stderr == ""


def test_recipes_lists_every_recipe():
    listed = {line.split()[0] for line in latemask("recipes").stdout.splitlines() if line.strip()}
    assert set(names()) <= listed
    assert "mlm_base" not in latemask("recipes", "--size", "tiny").stdout


def test_pretrain_asks_for_what_is_missing():
    for arguments, where in (
        (["mlm_tiny"], "--out"),
        (["mlm_tiny", "--out", "x"], "--data"),
        (["mlm_tiny", "--out", "x", "--resume", "x"], "--resume"),
        (["--data", "x"], "pretrain"),
        (["--resume", "no/such/run"], "no/such/run"),
    ):
        with pytest.raises(Refusal) as refused:
            pretrain.read(arguments)
        assert refused.value.where == where
    options, run = pretrain.read(["mlm_tiny", "--data", "d", "--out", "o", "--resume-if-present"])
    assert options == pretrain.PretrainOptions(data=Path("d"), out=Path("o"), resume_if_present=True)
    assert run == recipe("mlm_tiny")


def test_resume_reads_the_runs_own_settings(tmp_path):
    from latemask.model.pretrainer import Pretrainer
    from latemask.training import checkpoint

    narrow = {"shape.width": 16, "shape.heads": 2, "shape.depth": 1, "training.steps": 77}
    saved = replace(recipe("mlm_tiny"), narrow)
    for step in (0, 9):
        checkpoint.write(tmp_path, saved, checkpoint.State(updates=step), Pretrainer(saved).state_dict(), {}, b"{}")
    newest = tmp_path / "step-0000009" / "run.json"
    for damaged in ("{", newest.read_text().replace('"depth": 1', '"depth": 2'), "[" * 100_000):
        assert pretrain.read(["--resume", str(tmp_path)])[1] is None
        newest.write_text(damaged)
    assert pretrain.read(["--resume", str(tmp_path)])[1] is None
    changed = pretrain.read([f"--resume={tmp_path}", "--training.steps", "99"])[1]
    assert changed == replace(saved, {"training.steps": 99})
    with pytest.raises(Refusal, match="--out too"):
        pretrain.read(["--resume", str(tmp_path), "--out", str(tmp_path / "other")])


def test_flags_change_the_settings_of_the_checkpoint_that_is_gone_on_from(tmp_path):
    """Not those of a newer one whose run.json is whole while its weights are not."""
    from latemask.model.pretrainer import Pretrainer
    from latemask.training import checkpoint

    narrow = {"shape.width": 16, "shape.heads": 2, "shape.depth": 1, "training.steps": 77}
    old = replace(recipe("mlm_tiny"), narrow)
    new = replace(old, {"training.learning_rate": 0.5})
    for step, run in ((0, old), (9, new)):
        checkpoint.write(tmp_path, run, checkpoint.State(updates=step), Pretrainer(run).state_dict(), {}, b"{}")
    flags, wanted = ["--resume", str(tmp_path), "--training.steps", "99"], {"training.steps": 99}
    assert pretrain.read(flags)[1] == replace(new, wanted)
    (tmp_path / "step-0000009" / checkpoint.ENCODER).write_bytes(b"cut")
    assert pretrain.read(flags)[1] == replace(old, wanted)


@pytest.mark.parametrize(("reason", "status"), [("signal", 75), ("steps", 0)])
def test_status_after_sigterm_says_to_queue_the_run_again(reason, status, monkeypatch, capsys):
    from latemask.training import loop

    calls = []

    def ran(run, data, out, **options):
        calls.append((run, data, out, options))
        return loop.Outcome(out / "step-0000003", reason, None)

    monkeypatch.setattr(loop, "pretrain", ran)
    monkeypatch.setattr(pretrain, "refuse_early", lambda *given: None)
    assert pretrain.run_pretrain(["mlm_tiny", "--data", "d", "--out", "o", "--resume-if-present"]) == status
    assert calls == [(recipe("mlm_tiny"), Path("d"), Path("o"),
                      {"resume": "if-present", "overwrite": False, "trackers": ()})]  # fmt: skip
    assert ("--resume o" in capsys.readouterr().out) == (reason == "signal")


@pytest.mark.parametrize("arguments", [["prepare", "", "--out", "x"], ["report", "", "--out", "x.html"],
                                       ["report", "x", "--out="], ["pretrain", "mlm_tiny", "--data", "", "--out", "x"],
                                       ["fill", "a <mask>", "--model", ""]])  # fmt: skip
def test_an_empty_argument_is_not_the_current_folder(arguments, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match="found an empty value"):
        command_line.dispatch(arguments)
    assert os.listdir() == ["notes.txt"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_closed_standard_files(closed, tmp_path):
    command = f"{sys.executable} -m latemask tokenizer - --format text --out {tmp_path}/x < /dev/null {closed}"
    done = subprocess.run(command, shell=True, executable="/bin/bash", capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == (closed != "2>&-"), done.stderr


def test_a_file_name_that_is_not_utf8_is_printed(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text("some text")
    done = latemask("tokenizer", str(path), "--vocab-size", "270", "--out", str(tmp_path / "tok"))
    assert done.returncode == 0, done.stderr
    assert "caf\\udce9.txt" in done.stdout


def test_sigterm_before_training_begins_asks_to_be_queued_again(tmp_path):
    program = (
        "import os, signal; from latemask.cli import pretrain\n"
        "pretrain.read = lambda arguments: os.kill(os.getpid(), signal.SIGTERM)\n"
        "pretrain.run_pretrain([])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, "")


def test_doctor_says_which_kernels_run_and_why_not(monkeypatch):
    import torch

    from latemask.cli.self_test import kernels

    found = kernels(torch.device("cpu"))
    assert len(found) == 4
    assert {(used, "cpu" in why, "instead: " in why) for _, used, why in found} == {("no", True, True)}
    assert any("rotary positions" in name for name, _, _ in found)
    for name in ("INTERPRETED", "HAS_TRITON"):
        monkeypatch.setattr(f"latemask.kernels.relative_attention.{name}", True)
    used = [used for _, used, _ in kernels(torch.device("cpu"))]
    assert used == ["yes", "no", "no", "no"], "what the run itself would ask"
