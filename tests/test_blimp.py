"""Pseudo-log-likelihoods equal one forward pass a token; ties are wrong; the masked loss is the validation's own."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
import transformers

from latemask.config import replace
from latemask.downstream.blimp import Pair, accuracies, read_pairs, sentence_rows
from latemask.downstream.evaluation import evaluate
from latemask.downstream.held_out import held_out
from latemask.downstream.inputs import Inputs
from latemask.downstream.likelihood import pseudo_log_likelihoods
from latemask.downstream.masked_loss import masked_loss
from latemask.downstream.options import OF_SUITES, EvaluateOptions, FinetuneOptions
from latemask.downstream.runner import finetune
from latemask.errors import Refusal
from latemask.hf.loading import TransformersMaskedModel, load_masked_model
from latemask.model.masked_model import MaskedModel
from latemask.model.pretrainer import Pretrainer
from latemask.recipes import recipe
from trained import byte_level, write_run

CPU = torch.device("cpu")
TINY = {"shape.depth": 2, "shape.width": 32, "shape.heads": 2, "shape.feedforward": 48, "shape.row_tokens": 48,
        "decoder.depth": 1, "decoder.width": 32, "decoder.heads": 2, "decoder.feedforward": 48}  # fmt: skip
SENTENCES = ["the cat saw the bird.", "Paris", "the dog extraordinarily saw the bird; the cat.", "Paris is the capital"]


def masked_model(system="mae_lm"):
    tokenizer = byte_level()
    changes = {name: value for name, value in TINY.items() if system != "mlm" or not name.startswith("decoder")}
    run = replace(recipe(f"{system}_tiny"), changes | {"shape.vocabulary": tokenizer.vocabulary})
    torch.manual_seed(0)
    model = Pretrainer(run).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return MaskedModel(model).eval(), tokenizer


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("system", ["mlm", "mae_lm", "three_ml"])
def test_scores_equal_one_forward_pass_a_token(system, whole_words):
    model, tokenizer = masked_model(system if system != "three_ml" else "three_ml_self")
    rows, scored, words = sentence_rows(SENTENCES, Inputs(tokenizer, 48), whole_words)
    found = pseudo_log_likelihoods(model, rows, scored, mask=4, pad=1, device=CPU, words=words, batch_tokens=100)
    for number, text in enumerate(SENTENCES):
        ids = [0, *tokenizer.encode_batch([text])[0].tolist(), 2]
        owners = tokenizer.library.encode(text, add_special_tokens=False).word_ids
        total = 0.0
        for place in range(1, len(ids) - 1):
            hidden = [place]
            if whole_words:
                hidden += [other for other in range(place + 1, len(ids) - 1) if owners[other - 1] == owners[place - 1]]
            shown = [4 if other in hidden else token for other, token in enumerate(ids)]
            with torch.no_grad():
                total += float(model(torch.tensor([shown]))[0].log_softmax(-1)[ids[place]])
        assert found[number] == pytest.approx(total, abs=1e-5)
    lengths = [len(places) for places in scored]
    assert lengths == [len(ids) for ids in tokenizer.encode_batch(SENTENCES)]


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("system", ["mlm", "mae_lm", "three_ml_cross", "misaligned_positions"])
def test_the_host_never_waits_for_the_device_between_batches(system, whole_words, monkeypatch):
    """Of a tensor of device meta nothing can be read."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # which does not know the device
    model, tokenizer = masked_model(system)
    rows, scored, words = sentence_rows(SENTENCES, Inputs(tokenizer, 48), whole_words)
    done = []
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):  # at the end
        pseudo_log_likelihoods(model.to("meta"), rows, scored, mask=4, pad=1, device=torch.device("meta"), words=words,
                               batch_tokens=100, advance=done.append)  # fmt: skip
    assert sum(done) == sum(map(len, scored))


def test_every_batch_holds_rows_of_one_length_and_no_more_tokens_than_asked():
    model, tokenizer = masked_model()
    rows, scored, words = sentence_rows(SENTENCES * 3, Inputs(tokenizer, 48), True)
    seen = []
    model.register_forward_pre_hook(lambda _, given: seen.append((given[0].shape, (given[0] == 4).sum(1), given[1:])))
    pseudo_log_likelihoods(model, rows, scored, mask=4, pad=1, device=CPU, words=words, batch_tokens=100)
    assert sum(len(masks) for _, masks, _ in seen) == sum(map(len, scored))
    for (count, tokens), masks, (real, masked) in seen:
        assert real is None
        assert (masks == masked).all()
        assert count == 1 or count * tokens <= 100
    assert max(count for (count, _), _, _ in seen) > 1


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("kind", ["Roberta", "Bert", "MPNet", "RoFormer", "ModernBert", "DistilBert", "DebertaV2"])
def test_models_of_transformers_score_as_in_one_forward_pass_a_token(kind, whole_words):
    tokenizer = byte_level()
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=tokenizer.vocabulary, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, dim=32, n_layers=1,
        n_heads=2, hidden_dim=48, intermediate_size=48, max_position_embeddings=50, pad_token_id=1, bos_token_id=0,
        eos_token_id=2, cls_token_id=0, sep_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}ForMaskedLM")(config).double().eval()
    for weight in theirs.parameters():
        weight.data.add_(0.2 * torch.randn_like(weight))
    rows, scored, words = sentence_rows(SENTENCES[:2], Inputs(tokenizer, 48), whole_words)
    multiplied = []
    theirs.get_output_embeddings().register_forward_hook(lambda _, given, out: multiplied.append(out.shape))
    found = pseudo_log_likelihoods(TransformersMaskedModel(theirs, 4), rows, scored, mask=4, pad=1, device=CPU,
                                   words=words)  # fmt: skip
    assert sum(shape[0] for shape in multiplied) == sum(map(len, scored))
    assert all(shape[1] < min(map(len, rows)) for shape in multiplied)  # masks alone
    for number, row in enumerate(rows):
        total = 0.0
        for place in scored[number]:
            shown = torch.tensor(row[None]).long()
            behind = np.arange(len(row)) > place
            shown[0, place] = 4
            if words is not None:
                shown[0, behind & (words[number] == words[number][place])] = 4
            with torch.no_grad():
                total += float(theirs(shown, torch.ones_like(shown)).logits[0, place].log_softmax(-1)[row[place]])
        assert found[number] == pytest.approx(total, abs=1e-5)


def test_whole_words_hide_more():
    model, tokenizer = masked_model()
    scores = []
    for whole_words in (False, True):
        rows, scored, words = sentence_rows(SENTENCES, Inputs(tokenizer, 48), whole_words)
        scores.append(pseudo_log_likelihoods(model, rows, scored, mask=4, pad=1, device=CPU, words=words))
    assert (np.abs(scores[0] - scores[1]) > 1e-6)[2]


def test_accuracy_by_paradigm_field_and_overall():
    pairs = [Pair("", "", name, field) for name, field in (("a", "x"), ("a", "x"), ("b", "x"), ("c", "y"))]
    found = accuracies(pairs, np.array([-1.0, -2.0, -3.0, -4.0]), np.array([-2.0, -2.0, -1.0, -5.0]))
    assert (found["accuracy"], found["pairs"], found["ties"]) == (0.5, 4, 1)
    assert found["fields"] == {"x": {"accuracy": pytest.approx(1 / 3), "pairs": 3, "ties": 1},
                               "y": {"accuracy": 1.0, "pairs": 1, "ties": 0}}  # fmt: skip
    assert found["paradigms"]["a"] == {"field": "x", "accuracy": 0.5, "pairs": 2, "ties": 1}


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_any_minimal_pairs_are_read(tmp_path):
    write_lines(
        tmp_path / "data" / "one.jsonl", [{"sentence_good": "a", "sentence_bad": "b", "UID": "p", "field": "f/g"}] * 2
    )
    write_lines(tmp_path / "data" / "two.jsonl", [{"sentence_good": "a", "sentence_bad": "b"}, {"sentence_good": "a"},
                                                  {"sentence_good": " ", "sentence_bad": "b"}])  # fmt: skip
    pairs, refused, fingerprint = read_pairs(tmp_path)
    assert [(pair.paradigm, pair.field) for pair in pairs] == [("p", "f_g")] * 2 + [("two", "all")]
    assert list(refused.values()) == [2]
    some, _, whole = read_pairs(tmp_path, first=1)
    assert (len(some), whole) == (2, fingerprint)
    with pytest.raises(Refusal, match="yes"):
        read_pairs(tmp_path, good="yes")
    with pytest.raises(Refusal, match="one field, 'no'"):
        read_pairs(tmp_path, good="no", bad="no")
    empty = tmp_path / "empty"
    empty.mkdir()
    write_lines(tmp_path / "above" / "pairs" / "one.jsonl", [])
    with pytest.raises(Refusal, match=rf"no \.jsonl.*They lie one folder deeper: {tmp_path}/above/pairs"):
        read_pairs(tmp_path / "above")
    with pytest.raises(Refusal, match=r"no \.jsonl"):
        read_pairs(empty)


def test_sentences_that_cannot_be_scored_are_refused():
    model, tokenizer = masked_model()
    with pytest.raises(Refusal, match=r"'': found no token in ''"):
        sentence_rows(["a", ""], Inputs(tokenizer, 48), False)
    with pytest.raises(Refusal, match="at most 48"):
        sentence_rows(["extraordinarily " * 20], Inputs(tokenizer, 48), False)
    with pytest.raises(Refusal, match=r"^a\.jsonl:7: found \d+ tokens from 'extra.* at most 48"):
        sentence_rows(["a", long := "extraordinarily " * 20], Inputs(tokenizer, 48), False, {long: "a.jsonl:7"})
    with pytest.raises(Refusal, match="mask"):
        pseudo_log_likelihoods(model, [np.array([0, 4, 2])], [np.array([1])], mask=4, pad=1, device=CPU)
    rows, scored, _ = sentence_rows(["a <mask> b"], Inputs(tokenizer, 48), False)  # here it is text
    assert np.isfinite(pseudo_log_likelihoods(model, rows, scored, mask=4, pad=1, device=CPU)).all()


def run_of(folder, system="mae_lm"):
    changes = {name: value for name, value in TINY.items() if system != "mlm" or not name.startswith("decoder")}
    return write_run(folder / "runs" / system, replace(recipe(f"{system}_tiny"), changes), byte_level())


def roberta(folder, seed=0):
    """A Hugging Face masked language model with the same tokenizer."""
    tokenizer = byte_level()
    config = transformers.RobertaConfig(
        vocab_size=tokenizer.vocabulary, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=50,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.RobertaForMaskedLM(config).save_pretrained(folder)
    names = {f"{role}_token": name for role, name in tokenizer.special_names.items()}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.library, **names)
    wrapped.save_pretrained(folder)
    return folder


def test_the_command_scores_runs_and_hugging_face_models(tmp_path, capsys):
    same = {"sentence_good": "the cat saw", "sentence_bad": "the cat saw", "field": "f", "UID": "tied"}
    pairs = [
        {"sentence_good": "the cat saw the bird", "sentence_bad": "bird bird the the", "field": "f", "UID": "p"},
        same,
    ]
    write_lines(tmp_path / "pairs.jsonl", [*pairs, {"sentence_good": "alone"}])
    for model in (str(run_of(tmp_path)), str(roberta(tmp_path / "roberta"))):
        out = tmp_path / "out.json"
        options = EvaluateOptions(model, "blimp", str(tmp_path / "pairs.jsonl"), out=str(out), overwrite=True)
        found = evaluate(options)
        assert found["paradigms"]["tied"] == {"field": "f", "accuracy": 0.0, "pairs": 1, "ties": 1}
        assert found["ties"] == 1
        assert json.loads(out.read_text()) == found
        said = capsys.readouterr()
        assert "ties (wrong)" in said.out
        assert "pairs.jsonl: 1 rows left out" in said.err
        assert found["subset"] == {}
        part = evaluate(dataclasses.replace(options, first=1))
        assert (part["pairs"], part["subset"]) == (1, {"pairs": "the first 1 of each file"})
        assert "Subset, not to be set beside published numbers" in capsys.readouterr().out
    write_lines(tmp_path / "long.jsonl", [*pairs, {"sentence_good": "a", "sentence_bad": "a " * 60}])
    with pytest.raises(Refusal, match=r"long.jsonl:3: found \d+ tokens from 'a a"):
        evaluate(dataclasses.replace(options, data=str(tmp_path / "long.jsonl")))


def test_results_of_other_data_or_options_are_other_files(tmp_path, monkeypatch):
    model = str(run_of(tmp_path))
    monkeypatch.chdir(tmp_path)
    pair = {"sentence_good": "the cat saw", "sentence_bad": "saw the cat", "field": "f", "UID": "p"}
    for name, count in (("one.jsonl", 2), ("two.jsonl", 3), ("same.jsonl", 2)):
        write_lines(tmp_path / name, [pair] * count)
    asked = [
        EvaluateOptions(model, "blimp", "one.jsonl"),
        EvaluateOptions(model, "blimp", "two.jsonl"),
        EvaluateOptions(model, "blimp", "one.jsonl", first=1),
        EvaluateOptions(model, "blimp", "one.jsonl", good="sentence_bad", bad="sentence_good"),
    ]
    found = [evaluate(options) for options in asked]
    [kept] = {path.parent for path in tmp_path.rglob("blimp-*.json")}
    assert sorted(json.dumps(result) for result in found) == sorted(
        json.dumps(json.loads(path.read_text())) for path in kept.iterdir()
    )
    evaluate(EvaluateOptions(model, "blimp", str(tmp_path / "same.jsonl"), batch_tokens=64))  # the first again
    assert len(list(kept.iterdir())) == len(asked)


def test_a_folder_as_out_is_refused_before_anything_is_run(tmp_path):
    with pytest.raises(Refusal, match=r"--out: found the folder .*; wanted the name of a \.json file"):
        evaluate(EvaluateOptions("no model", "blimp", "no data", out=str(tmp_path)))


@pytest.mark.parametrize("field", ["first", "rows", "row_tokens", "batch_tokens"])
def test_counts_below_1_are_refused_before_anything_is_run(field):
    for count in (0, -1):
        with pytest.raises(Refusal, match=rf"--{field.replace('_', '-')}: found {count}; wanted at least 1"):
            evaluate(EvaluateOptions("no model", "blimp", "no data", **{field: count}))


NOT_READ = [("masked-loss", {"first": 9}, "blimp"), ("masked-loss", {"whole_words": True}, "blimp"),
            ("blimp", {"rows": 9}, "masked-loss"), ("finetuned", {"rate": 0.5}, "masked-loss"),
            ("finetuned", {"task": "own"}, "similarity"), ("blimp", {"dev": "x"}, "similarity"),
            ("similarity", {"label": "x"}, "own"), ("similarity", {"bad": "x"}, "blimp"),
            ("similarity", {"batch_tokens": 9}, "blimp"), ("similarity", {"precision": "bf16"}, "blimp"),
            ("finetuned", {"batch_tokens": 9}, "blimp, nor --suite masked-loss")]  # fmt: skip


@pytest.mark.parametrize(("suite", "given", "reader"), NOT_READ)
def test_options_that_the_suite_does_not_read_are_refused_before_anything_is_run(suite, given, reader):
    flag = f"--{next(iter(given)).replace('_', '-')}"
    with pytest.raises(Refusal, match=rf"{flag}: found no --(suite|task) {reader}, .*or {flag} left out"):
        evaluate(EvaluateOptions("no model", suite, "no data", **given))


def test_an_option_that_several_suites_read_names_them_all():
    with pytest.raises(Refusal, match="found no --suite similarity, nor --suite finetuned, and nothing else reads it"):
        evaluate(EvaluateOptions("no model", "blimp", "no data", dev="x"))


def test_an_option_of_a_suite_has_a_reader_and_every_other_is_read_by_all():
    """A new option has to be put with those that read it."""
    of_suites = {name for names in OF_SUITES.values() for name in names}
    assert {field.name for field in dataclasses.fields(EvaluateOptions)} - of_suites == {
        "model", "suite", "data", "out", "overwrite"}  # fmt: skip


def test_an_out_that_lies_in_a_file_is_refused_before_anything_is_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match=r"--out: found .*file, a file"):
        evaluate(EvaluateOptions("no model", "blimp", "no data", out=str(tmp_path / "file" / "x" / "out.json")))


def test_two_models_of_one_name_write_two_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "p.jsonl", [{"sentence_good": "a cat", "sentence_bad": "cat a"}])
    for parent, seed in (("a", 0), ("b", 1), ("c", 0)):
        evaluate(EvaluateOptions(str(roberta(tmp_path / parent / "same", seed)), "blimp", str(tmp_path / "p.jsonl")))
    assert len(list((tmp_path / "runs" / "same" / "downstream").glob("*.json"))) == 2


def prepared(folder):
    text = " ".join(f"the cat and the dog saw bird {number}; then Paris is the capital." for number in range(60))
    for name in ("a", "b"):
        write_lines(folder / f"{name}.jsonl", [{"text": text[place:], "source": name} for place in range(0, 60, 7)])
    return folder


@pytest.mark.parametrize("system", ["mlm", "mae_lm"])
def test_the_masked_loss_is_the_one_of_validation(tmp_path, system):
    from latemask.feed.batches import Rows, ValidationBatches

    run_of(tmp_path, system)
    folder = str(tmp_path / "runs" / system)
    model = load_masked_model(folder)
    pretrainer = model.pretrainer
    stream, names = held_out(prepared(tmp_path / "text"), byte_level(), 48 * 40)
    found = masked_loss(model, stream, byte_level(), row_tokens=48, rate=0.15, rows=20, batch_rows=7, device=CPU,
                        source_names=names)  # fmt: skip
    run = pretrainer.run
    batches = ValidationBatches(Rows(stream, run.shape, run.masked_tokens), run.masking, 20)
    with torch.no_grad():
        losses = pretrainer(batches.batch(0, 20)).double()
    assert found["loss"] == pytest.approx(float(losses.mean()), abs=1e-5)
    assert found["masked_tokens"] == losses.numel() == 20 * run.masked_tokens
    sources = batches.sources(0, 20, batches.batch(0, 20))
    for number, name in enumerate(names):
        chosen = losses.flatten()[torch.from_numpy(sources.astype(int)).flatten() == number]
        if len(chosen):
            assert found["by_source"][name] == pytest.approx(float(chosen.mean()), abs=1e-5)


def test_a_masked_loss_says_which_text_was_scored_wherever_it_lies_and_however_many_rows_go_at_once(tmp_path):
    model = str(run_of(tmp_path))
    one, copy, other = (prepared(tmp_path / name) for name in ("one", "copy", "other"))
    (other / "a.jsonl").write_text((other / "a.jsonl").read_text().replace("Paris", "Berlin"))

    def scored(text, **changes):
        options = EvaluateOptions(model, "masked-loss", str(text), out=str(tmp_path / "x.json"), rows=10, row_tokens=48)
        return evaluate(dataclasses.replace(options, overwrite=True, **changes))["fingerprint"]

    first = scored(one)
    assert re.fullmatch(r"[0-9a-f]{16}", first)
    assert scored(copy, batch_tokens=3 * 48) == first
    assert len({first, scored(other), scored(one, rows=9), scored(one, rate=0.5)}) == 4


def test_a_hugging_face_model_is_asked_for_the_same_masks(tmp_path):
    run_of(tmp_path)
    text = prepared(tmp_path / "text")
    found = []
    for model in (str(tmp_path / "runs" / "mae_lm"), str(roberta(tmp_path / "roberta"))):
        options = EvaluateOptions(model, "masked-loss", str(text), out=str(tmp_path / "x.json"), rows=10, row_tokens=48)
        found.append(evaluate(dataclasses.replace(options, overwrite=True)))
    assert found[0]["masked_tokens"] == found[1]["masked_tokens"]
    assert found[0]["fingerprint"] == found[1]["fingerprint"]
    theirs = load_masked_model(tmp_path / "roberta")
    assert found[1]["loss"] == pytest.approx(np.log(byte_level().vocabulary), abs=0.5)  # untrained
    assert theirs.shape.row_tokens == 48
    with pytest.raises(Refusal, match="at most 48"):
        evaluate(EvaluateOptions(str(tmp_path / "roberta"), "masked-loss", str(text), row_tokens=64))


def test_similarity_and_saved_models(tmp_path, capsys):
    run_of(tmp_path)
    model = str(tmp_path / "runs" / "mae_lm")
    rows = [{"a": "the cat saw", "b": "the cat saw", "score": 5.0}, {"a": "the cat", "b": "Paris;", "score": 1.0},
            {"a": "bird", "b": "the the the", "score": 0.0}]  # fmt: skip
    write_lines(tmp_path / "pairs.jsonl", rows)
    options = EvaluateOptions(model, "similarity", str(tmp_path), task="own", texts=("a", "b"), label="score",
                              dev="pairs.jsonl", out=str(tmp_path / "x.json"))  # fmt: skip
    found = evaluate(options)
    assert found["scores"]["dev"]["spearman"] >= 0.5  # equal texts come first
    from latemask.hf.vectors import encode

    first, second = encode([row["a"] for row in rows], model), encode([row["b"] for row in rows], model)
    cosines = torch.nn.functional.cosine_similarity(first, second)
    assert found["scores"]["dev"]["pearson"] == pytest.approx(float(np.corrcoef(cosines, [5, 1, 0])[0, 1]), abs=1e-5)
    shared = {"task": ("own",), "data": str(tmp_path), "train": "pairs.jsonl", "dev": "pairs.jsonl"}
    shared |= {"texts": ("a", "b"), "label": "score", "epochs": 1, "save": True, "sequence_tokens": 48}
    for kind in ("regression", "similarity", "classification"):
        out = tmp_path / kind
        [row] = finetune(FinetuneOptions(model, kind=kind, out=str(out), **shared))
        [saved] = out.glob("*.model")
        again = evaluate(EvaluateOptions(str(saved), "finetuned", str(tmp_path), dev="pairs.jsonl", out=f"{out}.json"))
        assert again["scores"]["dev"] == pytest.approx(row["scores"]["dev"])
        assert again["subset"] == row["subset"] == {}
    [row] = finetune(FinetuneOptions(model, out=str(tmp_path / "some"), train_rows=2, **shared))
    assert row["subset"] == {"train": "2 of 3"}
    capsys.readouterr()
    [saved] = (tmp_path / "some").glob("*.model")
    again = evaluate(
        EvaluateOptions(str(saved), "finetuned", str(tmp_path), dev="pairs.jsonl", out=str(tmp_path / "some.json"))
    )
    assert again["subset"] == {"train": "2 of 3"}  # what it was trained on goes with it
    assert "Subset, not to be set beside published numbers: train 2 of 3" in capsys.readouterr().out
    with pytest.raises(Refusal, match=r"\.json: found a result of another model; wanted one"):
        evaluate(EvaluateOptions(str(saved), "finetuned", str(tmp_path), dev="pairs.jsonl", out=f"{out}.json"))
    with pytest.raises(Refusal, match=r"--dev: found nothing; wanted the development file"):
        evaluate(EvaluateOptions(str(saved), "finetuned", str(tmp_path)))
    with pytest.raises(Refusal, match=r"--dev: found nothing; wanted the development file"):
        evaluate(dataclasses.replace(options, dev=""))
    with pytest.raises(Refusal, match=r"no finetuned\.json"):
        evaluate(EvaluateOptions(model, "finetuned", str(tmp_path), dev="pairs.jsonl"))
