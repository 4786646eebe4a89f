"""Ranks by layer: the right vectors in the right set, for our runs and for stock masked language models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from latemask import recipes
from latemask.batch import Batch
from latemask.cli.output import output
from latemask.cli.rank import RankOptions, run_rank
from latemask.config import Decoder, Masking, Run, Shape
from latemask.downstream.finetune import Model
from latemask.downstream.heads import FineTuned
from latemask.downstream.saving import save_finetuned
from latemask.downstream.tasks import GLUE
from latemask.errors import Refusal
from latemask.feed.masking import lay_out
from latemask.hf.exporting import export
from latemask.hf.loading import load_encoder, load_masked_model
from latemask.hf.places import of_no_run
from latemask.hf.source import Source
from latemask.joins import Join, late
from latemask.model.pretrainer import Pretrainer
from latemask.report import plots
from latemask.report.folders import read_folders
from latemask.report.studies import studies
from latemask.study.passes import Layer, Pass, Sample, chosen, clean_layers, in_place, masked_layers, open_subject
from latemask.study.rank_study import Moments, moments, rank_study, ranks, show
from latemask.text.prepare import prepare
from latemask.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from latemask.training import checkpoint
from latemask.writing import write_json
from trained import verified_here

SHAPE = Shape(depth=3, width=16, heads=2, feedforward=32, row_tokens=20, vocabulary=60)
GROWING = (Join(0, 0, 0.3), Join(1, 0.3, 0.6), Join(2, 0.6, 1))
MASKINGS = {
    "mlm": Masking(rate=0.3),
    "80/10/10": Masking(rate=0.5, filler=(0.4, 0.3, 0.3)),
    "joined before block 1, own vector": Masking(rate=0.5, joins=(Join(1),), vector="own"),
    "growing": Masking(rate=0.5, joins=GROWING),
    "reset": Masking(rate=0.3, joins=(Join(0), Join(2))),
    "misaligned": Masking(rate=0.3, aligned=False),
}


def pretrainer(masking: Masking, decoder: Decoder | None = None, **shape: object) -> tuple[Pretrainer, Batch]:
    """An untrained model in float64, and a batch for it."""
    torch.manual_seed(0)
    run = Run("x", dataclasses.replace(SHAPE, **shape), decoder, masking)
    ids = np.random.default_rng(0).integers(5, run.shape.vocabulary, (4, run.shape.row_tokens))
    ids[:, 0] = run.shape.specials.bos
    keys = torch.arange(4)
    batch = lay_out(
        torch.from_numpy(ids), masking, run.shape.specials, run.shape.vocabulary, seed=0, epoch=keys * 0, row=keys
    )
    return Pretrainer(run).double().eval(), batch


@pytest.mark.parametrize("positions", ["absolute", "absolute+relative", "rotary"])
@pytest.mark.parametrize("name", MASKINGS)
@torch.no_grad()
def test_masked_layers_are_the_pretraining_forward(name, positions):
    """At the end they are what the head reads; before it, those who have joined. [MASK] is what shows [MASK]."""
    model, batch = pretrainer(MASKINGS[name], positions=positions)
    layers = masked_layers(model, batch, counts_specials=True)
    torch.testing.assert_close(layers[-1].x[:, batch.n_visible :], model.predict(batch).hidden, rtol=0, atol=1e-12)
    lengths = model.plan.lengths(batch.n_visible, batch.n_masked)
    assert [layer.x.shape[1] for layer in layers] == [*lengths, lengths[-1]]
    for layer in layers:
        assert not layer.is_mask[:, : batch.n_visible].any()
        joined = layer.x.shape[1] - batch.n_visible
        assert (layer.is_mask[:, batch.n_visible :] == (batch.filler[:, :joined] == 4)).all()
        assert (layer.is_real ^ layer.is_mask).all()


@torch.no_grad()
def test_clean_layers_are_the_encoder_on_the_row_as_it_is():
    model, batch = pretrainer(MASKINGS["misaligned"], positions="absolute+relative")
    ids = torch.empty_like(batch.ids).scatter(1, batch.positions, batch.ids)
    states = model.encoder.states(ids)
    for layer, state in zip(clean_layers(model.encoder, batch, counts_specials=False), states, strict=True):
        torch.testing.assert_close(layer.x, state, rtol=0, atol=1e-12)
        assert (layer.is_real == (ids != 0)).all()


@torch.no_grad()
def test_appended_masks_give_the_ranks_of_masks_in_place():
    """The layout of a batch and the row of any stock model hold the same vectors, in another order."""
    model, batch = pretrainer(MASKINGS["mlm"], positions="absolute+relative")
    appended, placed = Moments(16, 3), Moments(16, 3)
    masked = masked_layers(model, batch, counts_specials=False)
    appended.add(in_place(model.encoder, batch.ids, torch.ones_like(batch.ids, dtype=torch.bool),
                          SHAPE.specials, None, 0, False)._replace(masked=masked))  # fmt: skip
    shown = torch.cat([batch.ids[:, : batch.n_visible], batch.filler], 1)
    ids = torch.empty_like(shown).scatter(1, batch.positions, shown)
    states = model.encoder.states(ids)
    is_mask = ids == 4
    for gram_real, gram_mask, state in zip(placed.real, placed.mask, states, strict=True):
        gram_real.add(state[~is_mask & (ids != 0)])
        gram_mask.add(state[is_mask])
    for ours, theirs in zip(appended.real + appended.mask, placed.real + placed.mask, strict=True):
        assert ours.count == theirs.count
        torch.testing.assert_close(ours.matrix(), theirs.matrix(), rtol=0, atol=1e-10)


def test_ranks_are_those_of_all_vectors_at_once():
    """Streamed in passes of different sizes; every set against numpy's singular values of the vectors side by side."""
    model, batch = pretrainer(MASKINGS["80/10/10"])
    found, kept = Moments(16, 3), {"masked_input": [], "masked_input_real": [], "clean_input": [], "masks": []}
    with torch.no_grad():
        for piece in (batch.slice(0, 1), batch.slice(1, 4)):
            masked, clean = masked_layers(model, piece, False), clean_layers(model.encoder, piece, False)
            found.add(in_place(model.encoder, piece.ids, torch.ones_like(piece.ids, dtype=torch.bool), SHAPE.specials,
                               None, 0, False)._replace(clean=clean, masked=masked))  # fmt: skip
            kept["masks"].append(masked[2].x[masked[2].is_mask])
            kept["masked_input_real"].append(masked[2].x[masked[2].is_real])
            kept["masked_input"].append(masked[2].x[masked[2].is_real | masked[2].is_mask])
            kept["clean_input"].append(clean[2].x[clean[2].is_real])
    row = ranks(found, 0.8)[2]
    for name, pieces in kept.items():
        vectors = torch.cat(pieces).numpy()
        for key, seen in (("rank", vectors), ("centred", vectors - vectors.mean(0))):
            energy = np.linalg.svd(seen, compute_uv=False) ** 2
            assert row[name][key] == 1 + int((energy.cumsum() < 0.8 * energy.sum()).sum())
        assert row[name]["vectors"] == len(vectors)


def test_only_ordinary_tokens_are_chosen_exactly_and_the_same_again():
    may_be = torch.rand(6, 40, generator=torch.Generator().manual_seed(0)) < 0.7
    may_be[3] = False
    may_be[4] = torch.arange(40) == 7
    first = chosen(may_be, 0.3, first_row=10)
    assert not (first & ~may_be).any()
    assert first.sum(1).tolist() == [0 if n == 0 else max(1, int(0.3 * n + 0.5)) for n in may_be.sum(1).tolist()]
    assert (first == chosen(may_be, 0.3, first_row=10)).all()
    assert (first[1:] == chosen(may_be[1:], 0.3, first_row=11)).all()
    assert (first[0] != chosen(may_be, 0.3, first_row=500)[0]).any()


WORDS = "the river ran over old stones while tall trees bent low and small birds sang of rain in far green hills"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Text, a tokenizer, a prepared store."""
    folder = tmp_path_factory.mktemp("rank")
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS.split(), draw.integers(5, 60))) for _ in range(300)]
    (folder / "text.txt").write_text("\n\n".join(texts))
    train_tokenizer([folder / "text.txt"], 300, folder / "tok")
    prepare([folder / "text.txt"], folder / "tok", folder / "data", valid_share=0.5, workers=1)
    return folder


def save_run(folder: Path, run: Run) -> Path:
    torch.manual_seed(0)
    tokenizer = (folder.parent / "tok" / "tokenizer.json").read_bytes()
    checkpoint.write(folder, run, checkpoint.State(updates=3), Pretrainer(run).state_dict(), {}, tokenizer)
    return folder


def tiny(system: str, folder: Path) -> Run:
    run = recipes.recipe(f"{system}_tiny")
    shape = dataclasses.replace(run.shape, vocabulary=load_tokenizer(folder / "tok").vocabulary, row_tokens=32)
    return dataclasses.replace(run, shape=shape)


def test_a_run_on_its_own_data(folder, capsys):
    """Files, table and figures; the counts are those of the rows: exactly M [MASK]s in each, <s> and </s> left out."""
    run = tiny("mlm", folder)
    model = save_run(folder / "mlm", run)
    run_rank(RankOptions(str(model), str(folder / "data"), tokens=1600, device="cpu"))
    study = json.loads((model / "rank.json").read_text())
    last = study["layers"][-1]
    rows = 50
    assert study["recipe"] == "mlm_tiny"
    [step] = model.glob("step-*")
    origin = (study["run"], study["step"], study["pretraining_seconds"])
    assert origin == ("mlm", int(step.name[5:]), checkpoint.read_state(step).seconds)
    assert study["rate"] == 0.15
    assert last["masks"]["vectors"] == rows * run.masked_tokens
    assert last["masked_input"]["vectors"] == last["clean_input"]["vectors"] < rows * 31
    assert last["masked_input"]["vectors"] == last["masks"]["vectors"] + last["masked_input_real"]["vectors"]
    assert len(study["layers"]) == run.shape.depth + 1
    for figure in ("rank-by-layer.svg", "rank-of-masks.svg"):
        assert (model / figure).read_text().startswith("<svg")
    said = capsys.readouterr().out
    assert "in parentheses: " in said
    assert "special tokens left out" in said
    counted = rank_study(Sample(str(model), str(folder / "data"), tokens=1600, specials="in", device="cpu"))
    assert counted["layers"][0]["clean_input"]["vectors"] == rows * 32


def test_a_step_folder_writes_beside_itself(folder):
    model = save_run(folder / "stepped", tiny("mlm", folder))
    run_rank(RankOptions(str(model / "step-0000003"), str(folder / "data"), tokens=320, device="cpu"))
    assert (model / "rank-step-0000003.json").is_file()
    assert checkpoint.fault(model / "step-0000003") is None


def test_encoders_that_never_see_masks_say_so(folder, capsys):
    model = save_run(folder / "mae", tiny("mae_lm", folder))
    run_rank(RankOptions(str(model), str(folder / "data"), tokens=320, device="cpu"))
    study = json.loads((model / "rank.json").read_text())
    assert all(
        layer[name] is None for layer in study["layers"] for name in ("masked_input", "masked_input_real", "masks")
    )
    assert all(layer["clean_input"]["rank"] > 0 for layer in study["layers"])
    assert "n/a" in capsys.readouterr().out
    assert not (model / "rank-of-masks.svg").exists()
    with pytest.raises(Refusal, match="never shown"):
        rank_study(Sample(str(model), str(folder / "data"), sees_masks="yes"))


def test_masks_that_join_later_are_not_there_before(folder):
    run = tiny("three_ml", folder)
    model = save_run(folder / "3ml", run)
    layers = rank_study(Sample(str(model), str(folder / "data"), tokens=640, device="cpu"))["layers"]
    joined = run.plan.in_encoder[0].layer
    assert [layer["masks"] is None for layer in layers] == [number < joined for number in range(len(layers))]
    assert all(layer["masked_input"] is not None for layer in layers)


def stock(kind: str, vocabulary: int) -> transformers.PreTrainedModel:
    """A small random masked language model."""
    torch.manual_seed(0)
    common = {"vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
                  "intermediate_size": 48, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}  # fmt: skip
    match kind:
        case "bert":
            return transformers.BertForMaskedLM(transformers.BertConfig(max_position_embeddings=40, **common))
        case "roberta":
            return transformers.RobertaForMaskedLM(transformers.RobertaConfig(max_position_embeddings=42, **common))
        case "mpnet":
            return transformers.MPNetForMaskedLM(transformers.MPNetConfig(max_position_embeddings=42, **common))
        case "modernbert":
            special = {
                "cls_token_id": 0,
                "sep_token_id": 2,
                "max_position_embeddings": 40,
                "global_attn_every_n_layers": 2,
            }
            return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**common, **special))
        case "deberta":
            return transformers.DebertaForMaskedLM(transformers.DebertaConfig(max_position_embeddings=40, **common))
        case "deberta-v2":
            relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 40}
            return transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**common, **relative))
    raise AssertionError(kind)


def save_stock(kind: str, folder: Path) -> Path:
    out = folder / kind
    model = stock(kind, load_tokenizer(folder / "tok").vocabulary)
    model.save_pretrained(out)
    names = {"bos_token": "<s>", "cls_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "sep_token": "</s>",
                 "unk_token": "<unk>", "mask_token": "<mask>"}  # fmt: skip
    file = str(folder / "tok" / "tokenizer.json")
    transformers.PreTrainedTokenizerFast(tokenizer_file=file, **names).save_pretrained(out)
    return out


@pytest.mark.parametrize("kind", ["bert", "roberta", "mpnet", "modernbert", "deberta", "deberta-v2"])
def test_stock_models_against_transformers_row_by_row(kind, folder, capsys):
    """Clean and masked sets from padded rows, against each row by itself through transformers' own masked model."""
    out = save_stock(kind, folder)
    sample = Sample(
        str(out), str(folder / "text.txt"), tokens=400, micro_rows=5, row_tokens=36, rate=0.25, device="cpu"
    )
    found = moments(open_subject(sample))
    model = transformers.AutoModelForMaskedLM.from_pretrained(out).eval()
    tokenizer: Tokenizer = load_tokenizer(folder / "tok")
    texts = (folder / "text.txt").read_text().split("\n\n")
    rows = []
    for text in texts:
        ids = tokenizer.encode_batch([text])[0].tolist()
        rows += [[0, *ids[start : start + 34], 2] for start in range(0, len(ids), 34)]
    clean, real, masks, read = [], [], [], 0
    last = len(found.clean) - 1
    for number in range(0, len(rows), 5):
        if read >= 400:
            break
        for row_number, row in enumerate(rows[number : number + 5], number):
            ids = torch.tensor([row])
            masked = chosen((ids > 4), 0.25, row_number)
            with torch.no_grad():
                states = model.base_model(ids).last_hidden_state[0]
                masked_states = model.base_model(ids.masked_fill(masked, 4)).last_hidden_state[0]
            clean.append(states[1:-1])
            real.append(masked_states[1:-1][~masked[0, 1:-1]])
            masks.append(masked_states[masked[0]])
            read += len(row)
    for gram, pieces in ((found.clean[last], clean), (found.real[last], real), (found.mask[last], masks)):
        vectors = torch.cat(pieces).double()
        assert gram.count == len(vectors)
        torch.testing.assert_close(gram.matrix(), vectors.T @ vectors, rtol=1e-4, atol=1e-3)
    result = folder / kind / "study" / "r.json"
    run_rank(RankOptions(str(out), str(folder / "data"), tokens=200, out=str(result), device="cpu"))
    study = json.loads(result.read_text())
    assert study["sees_masks"]
    assert study["recipe"] is study["run"] is study["step"] is study["pretraining_seconds"] is None
    assert load_encoder(out).shape.depth == len(study["layers"]) - 1


def test_a_run_with_other_data_is_fed_in_place(folder):
    """Text of another tokenizer, or a file: rows of its own tokenizer, masked at its own rate."""
    model = save_run(folder / "elsewhere", tiny("mlm", folder))
    study = rank_study(Sample(str(model), str(folder / "text.txt"), tokens=300, device="cpu"))
    assert study["layers"][0]["masks"]["vectors"] > 0
    late_model = save_run(folder / "elsewhere-late", tiny("three_ml_self", folder))
    assert not rank_study(Sample(str(late_model), str(folder / "text.txt"), tokens=300, device="cpu"))["sees_masks"]


@pytest.mark.parametrize(
    ("where", "change"),
    [("--tokens", {"tokens": 0}), ("--rate", {"rate": 1.0}), ("--row-tokens", {"row_tokens": 2}),
     ("--micro-rows", {"micro_rows": 0}), ("--specials", {"specials": "yes"}), ("--sees-masks", {"sees_masks": "in"})],
)  # fmt: skip
def test_bad_samples_are_refused_by_name(where, change):
    with pytest.raises(Refusal) as refused:
        Sample("model", "data", **change)
    assert refused.value.where == where


def test_results_of_what_is_no_run_need_a_place(folder):
    out = save_stock("bert", folder)
    for model, found in ((str(out), "a Hugging Face model"), ("bert-of-the-hub", "no such folder")):
        with pytest.raises(Refusal) as refused:
            output(Source.of(model), None, "rank")
        assert (refused.value.where, refused.value.found) == ("--out", f"nothing, and at {model} {found}")
        assert of_no_run(model) == found
    with pytest.raises(Refusal, match="--out"):
        run_rank(RankOptions(str(out), str(folder / "text.txt"), out=str(folder)))
    with pytest.raises(Refusal, match="--tau"):
        run_rank(RankOptions(str(out), str(folder / "text.txt"), tau=2, out=str(folder / "r.json")))


def test_an_empty_text_is_refused(folder):
    (folder / "empty.txt").write_text("\n\n")
    model = save_run(folder / "hungry", tiny("mlm", folder))
    with pytest.raises(Refusal):
        rank_study(Sample(str(model), str(folder / "empty.txt"), device="cpu"))


def test_a_bad_row_is_refused_before_anything_is_computed(folder):
    (folder / "bad.jsonl").write_text('{"text": "a b c"}\n' * 40 + '{"text": null}\n')
    model = save_run(folder / "careful", tiny("mlm", folder))
    with pytest.raises(Refusal, match=r"bad\.jsonl:41: found text = null; .* Mend the file$"):
        open_subject(Sample(str(model), str(folder / "bad.jsonl"), device="cpu"))


def test_late_recipes_join_nothing_in_the_encoder():
    model, batch = pretrainer(Masking(rate=0.3, joins=late()), Decoder(depth=1, width=16, heads=2, feedforward=32))
    with torch.no_grad():
        layers = masked_layers(model, batch, counts_specials=False)
    assert not any(layer.is_mask.any() for layer in layers)


def test_figures_are_the_same_bytes_and_tell_series_apart_thrice():
    series = {f"run {number}": [(0, number), (1, number + 1)] for number in range(8)}
    first, second = (plots.svg(plots.lines(series, "layer", "rank")) for _ in range(2))
    assert first == second
    assert "run 7" in first
    figure = plots.lines(series, "layer", "rank")
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in figure.axes[0].lines}
    assert len(looks) == 8
    assert len({look[0] for look in looks}) == len({look[2] for look in looks}) == 8
    plots.plt.close(figure)


def test_losses_stand_at_the_tokens_seconds_and_flops_of_their_step():
    journal = [
        {"kind": "start", "run": {}, "plain_flops_per_token": 10.0},
        {"kind": "validation", "step": 0, "loss": 5.0},
        {"kind": "train", "step": 2, "tokens": 100, "seconds": 4.0, "loss": 4.5},
        {"kind": "validation", "step": 2, "loss": 4.0},
    ]
    assert plots.loss_points(journal, "step") == [(0, 5.0), (2, 4.0)]
    assert plots.loss_points(journal, "seconds") == [(0.0, 5.0), (4.0, 4.0)]
    assert plots.loss_points(journal, "flops") == [(0.0, 5.0), (1000.0, 4.0)]
    assert plots.loss_points(journal[:1] + journal[2:3], "flops") == [(1000.0, 4.5)]


def test_files_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "folder" / "study.json"
    write_json(path, {"rank": 3})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"rank": float("nan")})
    assert json.loads(path.read_text()) == {"rank": 3}
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):  # noqa: PT011
        write_json(tmp_path / "taken", {})
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["folder", "study.json", "taken"]


# What is known of a model's pretraining, and what is said where there are no numbers

SEEN = {"mlm": True, "mlm_80_10_10": True, "decoder_resets_mask": True, "mae_lm": False, "random_replace": False,
        "three_ml": False, "delta": False, "gradual": False, "decoder_causal_cross": False}  # fmt: skip


def finetuned(model: Path, out: Path) -> Path:
    """``model`` with a new head, saved as `latemask finetune --save` does."""
    loaded = Model.load(model)
    net = FineTuned(loaded.encoder, "classification", 2, 0.0, None)
    problem = SimpleNamespace(task=GLUE["rte"])
    save_finetuned(net, loaded, problem, {}, out)  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("positions", ["absolute", "absolute+relative", "rotary"])
@pytest.mark.parametrize("system", SEEN)
def test_what_is_finetuned_from_a_run_knows_whether_its_encoder_saw_masks(system, positions, folder, tmp_path):
    """In each of the three families, and after a second fine-tuning; --sees-masks overrules."""
    run = tiny(system, folder)
    shape = dataclasses.replace(run.shape, positions=positions, depth=4, width=16, heads=2, feedforward=32)
    decoder = run.decoder and dataclasses.replace(run.decoder, width=16, heads=2, feedforward=32)
    (tmp_path / "tok").symlink_to(folder / "tok")
    model = save_run(tmp_path / "run", dataclasses.replace(run, shape=shape, decoder=decoder))
    once = finetuned(model, tmp_path / "rte-e1-lr1.model")
    for out in (once, finetuned(once, tmp_path / "rte-e2-lr1.model")):
        given = {"model": str(out), "data": str(folder / "text.txt"), "device": "cpu"}
        subject = open_subject(Sample(**given))
        assert subject.sees_masks == SEEN[system]
        assert (next(subject.passes()).masked is not None) == SEEN[system]
        for said in ("yes", "no"):
            assert open_subject(Sample(**given, sees_masks=said)).sees_masks == (said == "yes")


def test_an_export_knows_whether_its_encoder_saw_masks(folder, tmp_path, capsys):
    """With its decoder; test_export asks every other."""
    with verified_here():
        out = export(save_run(folder / "exported", tiny("mae_lm", folder)), tmp_path / "out", kind="masked-lm").folder
    file = tmp_path / "rank.json"
    run_rank(RankOptions(str(out), str(folder / "text.txt"), tokens=300, out=str(file), device="cpu"))
    assert [layer["masks"] for layer in json.loads(file.read_text())["layers"]] == [None] * 5
    assert "no block of this encoder sees [MASK]" in capsys.readouterr().out
    (out / "SHA256SUMS").unlink()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"mask_in_encoder": "perhaps"}))
    with pytest.raises(Refusal, match="mask_in_encoder"):
        open_subject(Sample(str(out), str(folder / "text.txt")))
    del config["mask_in_encoder"]
    (out / "config.json").write_text(json.dumps(config))
    assert open_subject(Sample(str(out), str(folder / "text.txt"), device="cpu")).sees_masks  # as any other model


def test_the_star_stands_at_the_number_that_more_vectors_would_raise(capsys):
    """Isotropic vectors far from the origin: one direction carries the mean, few vectors show the others too few."""
    found = Moments(64, 0)
    vectors = torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(0)) + 50
    everybody, nobody = torch.ones(1, 200, dtype=torch.bool), torch.zeros(1, 200, dtype=torch.bool)
    found.add(Pass([Layer(vectors, everybody, nobody)], None))
    study = {"model": "x", "tau": 0.9, "width": 64, "rate": 0.15, "specials": "left out", "sees_masks": False,
             "without_masks": "never", "layers": ranks(found, 0.9)}  # fmt: skip
    clean = study["layers"][0]["clean_input"]
    assert (clean["rank"], clean["capped"], clean["few_vectors"]) == (1, ["centred"], True)
    show(study)
    assert f"1 ({clean['centred']}*)" in capsys.readouterr().out
    full = ranks(found, 1.0)[0]["clean_input"]
    assert (full["rank"], full["centred"], full["capped"], full["few_vectors"]) == (64, 64, [], False)


def test_a_finetuned_model_is_told_where_the_report_finds_its_rank(folder):
    run = save_run(folder / "tuned", tiny("mlm", folder))
    model = finetuned(run, run / "downstream" / "rte-e3-lr1e-04-b16-s0.model")
    options = RankOptions(str(model), str(folder / "text.txt"), tokens=300, device="cpu")
    with pytest.raises(Refusal) as refused:
        run_rank(options)
    advised = run / "rank-rte.json"
    assert f"--out {advised}," in refused.value.do
    run_rank(dataclasses.replace(options, out=str(advised)))
    [study] = studies(read_folders([run]), "rank")
    assert (study["name"], study["on"]) == ("tuned", "rte")


def test_a_rate_at_which_nothing_or_everything_is_masked_says_so(folder, tmp_path, capsys):
    model = save_run(folder / "rated", tiny("mlm", folder))
    sample = Sample(str(model), str(folder / "data"), tokens=320, rate=0.001, device="cpu")
    show(rank_study(sample))
    said = " ".join(capsys.readouterr().out.split())  # a title wraps at the width of its table
    assert "0.1% masked" in said
    assert "n/a: no token of a row of 32 is masked at a rate of 0.001" in said
    half = save_run(folder / "rated-delta", tiny("delta", folder))
    study = rank_study(dataclasses.replace(sample, model=str(half), rate=0.03))  # one masked, halves up: it joins
    assert study["layers"][0]["masks"]["vectors"] == 10
    with pytest.raises(Refusal) as refused:
        rank_study(dataclasses.replace(sample, rate=0.999))
    assert (refused.value.where, refused.value.do) == ("--rate", "Lower --rate")
    (tmp_path / "short.txt").write_text("\n\n".join([f"{one} {two}" for one in WORDS.split() for two in WORDS.split()]))
    prepare([tmp_path / "short.txt"], folder / "tok", tmp_path / "data", valid_share=0.5, workers=1)
    with pytest.raises(Refusal, match="may be masked") as refused:
        rank_study(dataclasses.replace(sample, data=str(tmp_path / "data"), rate=0.9))
    assert refused.value.do == "Lower --rate"
    (tmp_path / "word.txt").write_text("\n\n".join(["the"] * 20))
    show(rank_study(dataclasses.replace(sample, data=str(tmp_path / "word.txt"), rate=0.9)))
    assert "no real token is left beside [MASK] at a rate of 0.9" in capsys.readouterr().out


def test_layers_before_a_join_say_so(folder, capsys):
    model = save_run(folder / "joined", tiny("three_ml", folder))
    show(rank_study(Sample(str(model), str(folder / "data"), tokens=320, device="cpu")))
    assert "n/a: no [MASK] has joined before that layer" in capsys.readouterr().out


@pytest.mark.parametrize("data", ["data", "text.txt"])
def test_a_text_that_holds_fewer_tokens_is_told_once_with_both_numbers(data, folder, capsys):
    model = save_run(folder / f"long-{data}", tiny("mae_lm", folder))
    study = rank_study(Sample(str(model), str(folder / data), tokens=1_234_567, specials="in", device="cpu"))
    read = study["layers"][0]["clean_input"]["vectors"]
    [warning] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert "1,234,567" in warning
    assert f"{read:,} tokens" in warning
    rank_study(Sample(str(model), str(folder / data), tokens=read, device="cpu"))
    assert "warning" not in capsys.readouterr().err


def test_models_that_fill_no_masks_are_refused_by_name(folder, tmp_path):
    vocabulary = load_tokenizer(folder / "tok").vocabulary
    small = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 2}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, **small))
    bert = transformers.BertLMHeadModel(transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, is_decoder=True, **small
    ))  # fmt: skip
    for name, model in {"GPT2LMHeadModel": gpt2, "BertLMHeadModel": bert}.items():
        model.save_pretrained(tmp_path / name)
        for opened in (lambda out: open_subject(Sample(str(out), str(folder / "text.txt"))), load_masked_model):
            with pytest.raises(Refusal, match=f"{name}, no masked language model"):
                opened(tmp_path / name)
