"""A process that has never heard of latemask loads an export and computes what the run computes, or there is no export.

An ``export`` here verifies itself in a fresh process, and takes the seconds that one takes, but for one that is wrong.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from latemask.config import Run
from latemask.downstream.options import FinetuneOptions
from latemask.downstream.runner import finetune
from latemask.errors import Refusal
from latemask.hf import ExportOptions, FillOptions, exporting, run_export, run_fill, stock, tokenization, verification
from latemask.hf.checksums import SUMS
from latemask.hf.exporting import export
from latemask.hf.filling import Guess, fill
from latemask.hf.loading import load_encoder, load_masked_model, load_tokenizer_of
from latemask.hf.vectors import encode, framed
from latemask.recipes import recipe
from latemask.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from latemask.writing import check_free
from samples import small, with_shape
from trained import TEXT, byte_level, character_level, verified_here, write_run

NASTY = [
    "", " ", "  a  b ", "\t\n\r\n x", "cat,dog;bird", "THE CAT", "naïve café", "e\u0301", "東京タワー", "don't I'll",
    "👩\u200d👩\u200d👧", "\x00\x01\x7f", "\ufeffcat", "a" * 300, "12345 1.5e-3", "\u00a0\u2028x", "<mask>",
    "the <mask> cat", "</s><s><pad><unk>", "< mask >", "cat<mask>dog</s>",
]  # fmt: skip


def keys(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def rotary_decoder(run: Run) -> Run:
    assert run.decoder is not None
    return replace(run, decoder=replace(run.decoder, positions="absolute+rotary"))


def exported(folder: Path, run: Run, kind="encoder", tokenizer: Tokenizer | None = None) -> Path:
    write_run(folder / "run", run, tokenizer or byte_level())
    done = export(folder / "run", folder / "out", kind=kind)
    assert done.max_difference < 1e-9
    assert done.literals_are_text == (kind == "encoder")
    assert json.loads((folder / "out" / "config.json").read_text())["mask_in_encoder"] == run.mask_in_encoder
    return folder / "out"


JOURNAL = [
    {"kind": "train", "step": 10, "tokens": 11_000, "seconds": 900.0, "loss": 4.0},
    {"kind": "validation", "step": 20, "loss": 3.21, "rate": 0.15, "rows": 4},
    {"kind": "train", "step": 20, "tokens": 22_000, "seconds": 1800.0, "loss": 3.5},
    {"kind": "validation", "step": 30, "loss": 1.0, "rate": 0.15, "rows": 4},
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """MAE-LM without relative positions, by the command: a RobertaModel."""
    folder = tmp_path_factory.mktemp("encoder")
    write_run(folder / "run", small("mae_lm", positions="absolute"), byte_level(), updates=20)
    journal = "".join(json.dumps(line) + "\n" for line in JOURNAL) + '{"kind": "tr'
    (folder / "run" / "journal.jsonl").write_text(journal)
    (folder / "out").mkdir()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run_export(ExportOptions(str(folder / "run"), str(folder / "out")))
    assert re.search(r"RobertaModel .* largest difference \d\.\de-1\d", said.getvalue())
    return folder / "out"


@pytest.fixture(scope="module")
def filler(tmp_path_factory) -> Path:
    """MAE-LM with decoder: latemask's own class."""
    return exported(tmp_path_factory.mktemp("filler"), small("mae_lm"), "masked-lm")


def test_an_encoder_says_whether_it_saw_masks_and_its_card_too(encoder):
    assert load_encoder(encoder).mask_in_encoder == "never"
    assert "the encoder has never seen `<mask>`" in (encoder / "README.md").read_text()


def test_an_encoder_without_relative_positions_is_a_roberta(encoder):
    model, report = AutoModel.from_pretrained(encoder, output_loading_info=True)
    assert type(model).__name__ == "RobertaModel"
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = load_encoder(encoder.parent / "run")
    ids = torch.randint(10, 60, (2, 36), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids).last_hidden_state, ours(ids), rtol=0, atol=1e-5)
        assert torch.equal(model(ids).pooler_output, AutoModel.from_pretrained(encoder).eval()(ids).pooler_output)
    assert model.config.max_position_embeddings == 36 + byte_level().specials.pad + 1
    assert model.config.vocab_size == byte_level().vocabulary
    assert model.config.hidden_act == "gelu"


def test_a_classifier_grows_on_an_encoder(encoder):
    classifier, report = AutoModelForSequenceClassification.from_pretrained(encoder, output_loading_info=True)
    assert all(name.startswith("classifier.") for name in report["missing_keys"])
    assert all(name.startswith("pooler.") for name in report["unexpected_keys"])
    inputs = AutoTokenizer.from_pretrained(encoder)(["the cat", "a dog"], return_tensors="pt", padding=True)
    loss = classifier.train()(**inputs, labels=torch.tensor([0, 1])).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert classifier.roberta.embeddings.word_embeddings.weight.grad.abs().sum() > 0


def test_the_card_has_the_run_s_numbers_and_no_license(encoder):
    card = (encoder / "README.md").read_text()
    assert 'SentenceTransformer("path/to/this/folder").encode(' in card
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: feature-extraction\ntags:\n- latemask\n")
    assert "license" not in card
    for fact in ("| 22,000 |", "| 20 of", "3.2100 nats", "| 0.50 h |", "mae_lm_tiny", "has never seen `<mask>`"):
        assert fact in card, fact


def test_names_of_weights_carry_no_wrapper_and_files_no_pickle(encoder, filler):
    for folder in (encoder, filler):
        assert not [name for name in keys(folder) if "_orig_mod" in name or "module." in name]
        suffixes = {path.suffix for path in folder.rglob("*") if path.is_file() and path.name != SUMS}
        assert suffixes <= {".json", ".safetensors", ".md", ".py"}
        assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_auto_tokenizer_gives_the_ids_of_training(encoder):
    tokenizer, ours = AutoTokenizer.from_pretrained(encoder), byte_level()
    assert tokenizer.is_fast
    assert tokenizer.model_max_length == 36
    for text, ids in zip(NASTY, ours.encode_batch(NASTY), strict=True):
        assert tokenizer(text, truncation=True)["input_ids"] == framed(ids.tolist(), ours.specials, 36), repr(text)
    first, second = (ids.tolist() for ids in ours.encode_batch(["the cat", "a dog"]))
    bos, eos = ours.specials.bos, ours.specials.eos
    assert tokenizer("the cat", "a dog")["input_ids"] == [bos, *first, eos, eos, *second, eos]
    offsets = tokenizer("the cat", return_offsets_mapping=True)["offset_mapping"]
    assert all("the cat"[start] != " " for start, stop in offsets if start < stop)
    assert tokenizer.decode(tokenizer("the cat, <mask>")["input_ids"][1:-1]) == "the cat, <mask>"
    ids = load_tokenizer_of(encoder).encode_batch(NASTY)
    assert all(np.array_equal(one, other) for one, other in zip(ids, ours.encode_batch(NASTY), strict=True))


def test_an_encoder_never_fills_masks_in_silence(encoder, caplog):
    with pytest.raises(Exception, match="mask_token"):
        pipeline("fill-mask", model=str(encoder))("the <mask> cat")
    with library_warnings(caplog):
        AutoModelForMaskedLM.from_pretrained(encoder)
    assert "lm_head.dense.weight" in caplog.text
    with pytest.raises(Refusal, match="an encoder alone"):
        load_masked_model(encoder)


@contextlib.contextmanager
def library_warnings(caplog):
    """transformers' loggers do not reach pytest by themselves."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


def test_a_masked_model_fills_masks_in_transformers_pipeline_as_here(filler):
    text = "the cat saw the <mask>; then<mask> the bird."
    expected = fill(text, filler.parent / "run", top=4)
    assert [[guess.id for guess in guesses] for guesses in fill(text, filler, top=4)] == [
        [guess.id for guess in guesses] for guesses in expected
    ]
    found = pipeline("fill-mask", model=str(filler), top_k=4, trust_remote_code=False)(text)
    assert_same_guesses(expected, found)


def assert_same_guesses(expected: list[list[Guess]], found: list[list[dict]]) -> None:
    assert len(found) == len(expected)
    for guesses, others in zip(expected, found, strict=True):
        assert [guess.id for guess in guesses] == [other["token"] for other in others]
        scores = [other["score"] for other in others]
        assert [guess.probability for guess in guesses] == pytest.approx(scores, abs=1e-5)


@pytest.mark.slow
def test_a_fresh_process_fills_masks_with_the_code_that_came_along(filler):
    text = "the cat saw the <mask>; then<mask> the bird."
    code = (
        "import json, sys; from transformers import pipeline;"
        "fill = pipeline('fill-mask', model=sys.argv[1], trust_remote_code=True, top_k=4);"
        "print(json.dumps([type(fill.model).__module__, fill(sys.argv[2])]))"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(filler.parent / "home")}
    command = [sys.executable, "-c", code, str(filler), text]
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    module, found = json.loads(said.stdout.splitlines()[-1])
    assert module.startswith("transformers_modules.")
    assert_same_guesses(fill(text, filler.parent / "run", top=4), found)


def test_the_fill_command_shows_tokens_and_probabilities(filler, capsys):
    run_fill(FillOptions("the <mask> cat", str(filler), top=2))
    said = capsys.readouterr().out
    for guess in fill("the <mask> cat", filler, top=2)[0]:
        assert repr(guess.token) in said
        assert f"{guess.probability:.4f}" in said


def test_logits_and_loss_of_a_masked_model_are_as_it_says(filler):
    model = AutoModelForMaskedLM.from_pretrained(filler, trust_remote_code=False).eval()
    mask = byte_level().specials.mask
    ids = torch.randint(10, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    ids[0, [3, 7]], ids[1, 5] = mask, mask
    labels[0, 3] = -100
    with torch.no_grad():
        found = model(input_ids=ids, labels=labels)
        visible = ids != mask
        assert torch.equal(found.logits.argmax(-1)[visible], ids[visible])
        assert torch.equal(found.logits.softmax(-1)[visible].amax(-1), torch.ones(int(visible.sum())))
        expected = torch.nn.functional.cross_entropy(found.logits[~visible][1:], labels[~visible][1:])
        torch.testing.assert_close(found.loss, expected)
        assert float(model(input_ids=ids, labels=torch.full_like(ids, -100)).loss) == 0
        torch.testing.assert_close(load_masked_model(filler)(ids), found.logits[~visible])
    with pytest.raises(ValueError, match="37 tokens"):
        model(input_ids=torch.full((1, 37), 9))


def test_the_encoder_of_a_masked_model_is_the_encoder(filler):
    ids = torch.randint(10, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(load_encoder(filler)(ids), load_encoder(filler.parent / "run")(ids))


def test_a_masked_model_learns(filler):
    model = AutoModelForMaskedLM.from_pretrained(filler, trust_remote_code=False).train()
    ids = torch.full((1, 8), byte_level().specials.mask)
    model(input_ids=ids, labels=torch.full_like(ids, 9)).loss.backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


@pytest.mark.slow
def test_plain_mlm_fills_masks_as_a_stock_class(tmp_path):
    folder = exported(tmp_path, small("mlm", positions="absolute"), "masked-lm")
    assert not (folder / "modeling_latemask.py").exists()
    found = pipeline("fill-mask", model=str(folder), top_k=3)("the <mask> saw")
    expected = fill("the <mask> saw", tmp_path / "run", top=3)[0]
    assert [guess.id for guess in expected] == [other["token"] for other in found]
    assert type(AutoModelForMaskedLM.from_pretrained(folder)).__name__ == "RobertaForMaskedLM"


@pytest.mark.slow
def test_a_tokenizer_of_the_user_s_own_travels_too(tmp_path):
    library = Library(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[UNK]", "[MASK]", "[CLS]", "[PAD]", "[SEP]"]
    library.train_from_iterator([TEXT], trainers.WordPieceTrainer(vocab_size=120, special_tokens=specials))
    folder = exported(tmp_path, small("mlm", positions="absolute"), "masked-lm", Tokenizer(library))
    found = pipeline("fill-mask", model=str(folder), top_k=3)("the [MASK] saw")
    assert [other["token"] for other in found] == [
        guess.id for guess in fill("the <mask> saw", tmp_path / "run", top=3)[0]
    ]
    assert '"Paris is the [MASK] of France."' in (folder / "README.md").read_text()


OWN = {
    "64 buckets": small("mae_lm", positions="absolute+relative", relative_buckets=64, row_tokens=150),
    "rotary, pre-norm": small("mae_lm", positions="rotary", norm="pre"),
    "pre-norm": small("three_ml", norm="pre"),
}


@pytest.mark.parametrize("run", [pytest.param(OWN["64 buckets"]), *(
    pytest.param(OWN[name], marks=pytest.mark.slow) for name in ("rotary, pre-norm", "pre-norm"))])  # fmt: skip
def test_an_encoder_that_no_stock_class_computes_brings_its_code(run, tmp_path):
    folder = exported(tmp_path, run)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LatemaskModel"]
    assert "AutoModelForMaskedLM" not in config["auto_map"]
    assert type(load_encoder(folder).model).__name__ == "LatemaskModel"
    with pytest.raises(Refusal, match="LatemaskModel, an encoder alone"):
        load_masked_model(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        small("three_ml"),
        rotary_decoder(small("mae_lm", positions="rotary")),
        small("decoder_512_wide", norm="pre"),
        small("gradual", positions="rotary"),
        with_shape(small("delta"), isolate_documents=True),
    ],
    ids=lambda run: run.recipe,
)
def test_ways_to_fill_masks_are_exported(run, tmp_path):
    exported(tmp_path, run, "masked-lm")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_unigram_tokenizer_is_exported(scheme, tmp_path):
    library = Library(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=list(SPECIAL_TOKENS), unk_token="<unk>")
    library.train_from_iterator([TEXT * 5], trainer)
    exported(tmp_path, small("mlm", positions="absolute"), "masked-lm", Tokenizer(library))


@pytest.mark.slow
def test_a_character_level_tokenizer_is_exported(tmp_path):
    exported(tmp_path, small("mlm", positions="absolute"), "masked-lm", character_level())


def shifted_positions(tensors, shape, kind):
    """What an exporter that counts positions from 0 would write."""
    out = TO_STOCK(tensors, shape, kind)
    out[stock.POSITIONS] = out[stock.POSITIONS].roll(-1, 0)
    return out


def without_a_bias(tensors, shape, kind):
    return {
        name: part for name, part in TO_STOCK(tensors, shape, kind).items() if "layer.1.output.dense.bias" not in name
    }


TO_STOCK = stock.to_stock


@pytest.mark.parametrize(
    ("fault", "found"),
    [(shifted_positions, "apart"), pytest.param(without_a_bias, "missing", marks=pytest.mark.slow)],
)
def test_a_wrong_export_is_refused_and_leaves_nothing(fault, found, tmp_path, monkeypatch):
    write_run(tmp_path / "run", small("mae_lm", positions="absolute"), byte_level())
    monkeypatch.setattr(stock, "to_stock", fault)
    with verified_here(), pytest.raises(Refusal, match=found):
        export(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_another_tokenizer_is_refused(tmp_path, monkeypatch):
    write_run(tmp_path / "run", small("mae_lm", positions="absolute"), byte_level())
    as_it_is = tokenization._with_special_tokens

    def lower_cased(whole, tokenizer, fills_masks):
        return as_it_is(whole, tokenizer, fills_masks) | {"normalizer": {"type": "Lowercase"}}

    monkeypatch.setattr(tokenization, "_with_special_tokens", lower_cased)
    with pytest.raises(Refusal, match="other ids"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_kept_unless_it_is_an_export(encoder, tmp_path):
    run = encoder.parent / "run"
    with pytest.raises(Refusal, match="something already there"):
        export(run, encoder)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(Refusal, match="other things"):
        export(run, tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    check_free(encoder, True, exporting.CARD, exporting.MARK)
    downloaded = tmp_path / "downloaded"
    shutil.copytree(encoder, downloaded)
    for card in ("---\ntags:\n- exbert\n---\n\n# A model\n", None):
        (downloaded / "README.md").unlink() if card is None else (downloaded / "README.md").write_text(card)
        with pytest.raises(Refusal, match="other things"):
            export(run, downloaded, overwrite=True)
    assert (downloaded / "model.safetensors").is_file()
    with pytest.raises(Refusal, match="run folder"):
        export(encoder, tmp_path / "out")
    write_run(tmp_path / "bart", small("decoder_causal_cross"), byte_level())
    with pytest.raises(Refusal, match="rewrites"):
        export(tmp_path / "bart", tmp_path / "out", kind="masked-lm")


def test_a_damaged_newest_checkpoint_is_not_exported_as_an_older_one(tmp_path):
    older = write_run(tmp_path / "run", small("mae_lm"), byte_level(), updates=3)
    newest = write_run(tmp_path / "run", small("mae_lm"), byte_level(), updates=4)
    (newest / "encoder.safetensors").write_bytes(b"cut")
    with pytest.raises(Refusal, match=f"step-0000004: encoder.safetensors differs.*name it: {older}"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_says_what_it_is_doing_before_it_waits(tmp_path, monkeypatch, capsys):
    def verified(*_, **__):
        told.append(capsys.readouterr().out)
        raise Refusal("model", "enough", "no more")

    told: list[str] = []
    monkeypatch.setattr(verification, "verify", verified)
    write_run(tmp_path / "run", small("mae_lm"), byte_level())
    with pytest.raises(Refusal, match="enough"):
        run_export(ExportOptions(str(tmp_path / "run"), str(tmp_path / "out")))
    assert "fresh process" in told[0]
    assert str(tmp_path / "out") in told[0]


@pytest.mark.parametrize(
    ("model", "out", "kind", "found"),
    [("run", "run", "encoder", "something already there"), ("none", "out", "encoder", "no such folder"),
     ("empty", "out", "encoder", "no checkpoint"), ("run", "out", "masked-lm", "rewrites")],
)  # fmt: skip
def test_nothing_is_said_to_be_written_where_nothing_is(model, out, kind, found, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "run", small("decoder_causal_cross"), byte_level())
    with pytest.raises(Refusal, match=found):
        run_export(ExportOptions(str(tmp_path / model), str(tmp_path / out), kind))
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "out").exists()


def test_the_card_of_a_stopped_run_says_what_was_trained_after_the_last_train_line(tmp_path):
    from latemask.hf.card import numbers

    lines = [{"kind": "validation", "step": 0, "loss": 8.3, "rate": 0.15},
             {"kind": "train", "step": 50, "tokens": 400, "seconds": 1800.0, "loss": 2.0},
             {"kind": "end", "step": 69, "tokens": 552, "seconds": 3600.0, "reason": "signal"},
             {"kind": "end", "step": 90, "tokens": 720, "seconds": 7200.0, "reason": "steps"}]  # fmt: skip
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = dict(numbers(tmp_path / "step-0000069", recipe("mlm_tiny")))
    assert (told["input tokens seen"], told["training time"]) == ("552", "1.00 h")
    assert told["validation loss"] == "not validated after step 0"
    untrained = dict(numbers(tmp_path / "step-0000000", recipe("mlm_tiny")))
    assert untrained["validation loss"].startswith("8.3000 nats per masked token ")
    rewriting = dict(numbers(tmp_path / "step-0000000", recipe("decoder_causal_cross_tiny")))
    assert rewriting["validation loss"].startswith("8.3000 nats per token of the row ")


def exported_with_card(folder: Path) -> None:
    with verified_here():
        export(folder / "run", folder / "out")
    assert "step 20); no better than word frequencies alone (7.0100) |" in (folder / "out" / "README.md").read_text()


def encoded(folder: Path) -> None:
    for _ in range(2):
        encode(["the cat"], folder / "run")


def fine_tuned(folder: Path) -> None:
    (folder / "a.csv").write_text("text,label\nthe cat,1\nthe dog,2\n" * 4)
    own = {"train": "a.csv", "dev": "a.csv", "epochs": 1, "seeds": 2, "together": 2, "sequence_tokens": 20}
    finetune(FinetuneOptions(str(folder / "run"), ("own",), str(folder), **own))


@pytest.mark.parametrize("use", [exported_with_card, encoded, fine_tuned])
def test_who_uses_an_encoder_that_knows_no_more_than_word_frequencies_is_told_once(use, tmp_path, capsys):
    lines = [{"kind": "start", "step": 0, "run": {}, "unigram_loss": 7.01},
             {"kind": "validation", "step": 20, "loss": 7.03, "rate": 0.15},
             {"kind": "plateau", "step": 20, "loss": 7.03},
             {"kind": "validation", "step": 30, "loss": 3.0}]  # fmt: skip
    write_run(tmp_path / "run", small("mae_lm", positions="absolute"), byte_level(), updates=20)
    (tmp_path / "run" / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    use(tmp_path)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "frequencies" in line]
    step = tmp_path / "run" / "step-0000020"
    said = "no better than word frequencies alone: validation loss 7.0300, theirs 7.0100"
    assert warnings == [f"warning: {step}: {said}"]


def test_a_damaged_journal_keeps_nobody_from_vectors_but_an_export_is_refused_at_once(tmp_path):
    write_run(tmp_path / "run", small("mae_lm"), byte_level())
    (tmp_path / "run" / "journal.jsonl").write_text("no JSON\n\n")
    assert len(encode(["the cat"], tmp_path / "run")) == 1
    with pytest.raises(Refusal, match=r"journal\.jsonl:1: found broken JSON"):
        export(tmp_path / "run", tmp_path / "out")


def test_a_journal_line_made_by_hand_is_named_by_the_card(tmp_path):
    from latemask.hf.card import numbers

    step = tmp_path / "step-0000003"
    line = {"kind": "train", "step": 3, "seconds": 1.0, "loss": 2.0}
    (tmp_path / "journal.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(Refusal, match="line 1, of kind train, without tokens"):
        numbers(step, recipe("mlm_tiny"))
    (tmp_path / "journal.jsonl").write_text('{"kind": "validation", "step": 3, "loss": 2.5}\n')
    assert ("validation loss", "2.5000 nats per masked token (step 3)") in numbers(step, recipe("mlm_tiny"))
