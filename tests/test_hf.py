"""Encoders go to transformers and come back unchanged; any folder becomes a model, or is refused with the reason."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
    RoFormerConfig,
    RoFormerModel,
)
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from latemask.config import Shape, Specials
from latemask.errors import Refusal
from latemask.hf import loading, stock
from latemask.hf.filling import Guess, fill, masked_ids, ties_spaces
from latemask.hf.loading import (
    TransformersEncoder,
    load_encoder,
    load_masked_model,
    load_pretrained,
    load_tokenizer_of,
)
from latemask.hf.vectors import encode
from latemask.model.attention import relative_buckets
from latemask.model.encoder import Encoder
from latemask.model.masked_model import MaskedModel
from latemask.recipes import recipe
from samples import EXACT, pretrainer_of, small
from trained import byte_level, character_level, write_run

SPECIALS = Specials()
ELSEWHERE = Specials(bos=3, pad=5, eos=7, unk=1, mask=0)


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """In float64, every parameter drawn at random: no bias of zero, no LayerNorm of one can hide a mistake."""
    generator = torch.Generator().manual_seed(0)
    model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + ("LayerNorm.weight" in name))
    return model


def roberta(specials: Specials, row_tokens: int = 36, **changes: object) -> RobertaModel:
    config = RobertaConfig(
        vocab_size=70, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=row_tokens + specials.pad + 1, pad_token_id=specials.pad, bos_token_id=specials.bos,
        eos_token_id=specials.eos, type_vocab_size=2, **changes,
    )  # fmt: skip
    return randomised(RobertaModel(config))


def mpnet(row_tokens: int = 36, **changes: object) -> MPNetModel:
    config = MPNetConfig(vocab_size=70, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                         intermediate_size=48, max_position_embeddings=row_tokens + 2, **changes)  # fmt: skip
    return randomised(MPNetModel(config))


def roformer(row_tokens: int = 36, **changes: object) -> RoFormerModel:
    sizes = {"embedding_size": 32, "pad_token_id": 1, "hidden_act": "gelu"}
    config = RoFormerConfig(vocab_size=70, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                            intermediate_size=48, max_position_embeddings=row_tokens, **(sizes | changes))  # fmt: skip
    model = RoFormerModel(config)
    angles = model.encoder.embed_positions.weight.double().clone()
    randomised(model)
    model.encoder.embed_positions.weight.data = angles
    return model


def rows(specials: Specials, length: int, side: str) -> tuple[Tensor, Tensor]:
    """Random ids: full rows, or rows of three lengths padded on one side."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 70, (3, length), generator=generator)
    lengths = torch.tensor([[length], [length // 2], [1]]) if side != "none" else torch.full((3, 1), length)
    places = torch.arange(length).expand(3, -1)
    real = places >= length - lengths if side == "left" else places < lengths
    return ids.masked_fill(~real, specials.pad), real


def assert_same_states(
    encoder: Encoder | TransformersEncoder, theirs: PreTrainedModel, ids: Tensor, real: Tensor
) -> None:
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=real.long(), output_hidden_states=True)
        found = encoder.states(ids, real)
        assert len(found) == len(expected.hidden_states)
        for ours, other in zip(found, expected.hidden_states, strict=True):
            torch.testing.assert_close(ours[real], other[real], **EXACT)
        torch.testing.assert_close(encoder(ids, real)[real], expected.last_hidden_state[real], **EXACT)


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("specials", [SPECIALS, ELSEWHERE, Specials(bos=1, pad=0, eos=2, unk=3, mask=4)])
def test_roberta_comes_in(specials, side):
    theirs = roberta(specials)
    ids, real = rows(specials, 36, side)
    assert_same_states(stock.from_transformers(theirs, specials), theirs, ids, real)


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_mpnet_comes_in_also_beyond_its_largest_distance(side):
    theirs = mpnet(row_tokens=300)
    ids, real = rows(SPECIALS, 300, side)
    assert_same_states(stock.from_transformers(theirs, SPECIALS), theirs, ids, real)


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_roformer_comes_in(side):
    """Its table of angles is in single precision."""
    theirs = roformer()
    ids, real = rows(SPECIALS, 36, side)
    encoder = stock.from_transformers(theirs, SPECIALS)
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=real.long()).last_hidden_state[real]
        torch.testing.assert_close(encoder(ids, real)[real], expected, rtol=0, atol=2e-5)
        theirs.encoder.embed_positions.weight.copy_(stock._angles(encoder.shape, torch.float64))
    assert_same_states(encoder, theirs, ids, real)


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize(
    ("positions", "specials"),
    [("absolute", SPECIALS), ("absolute", ELSEWHERE), ("rotary", ELSEWHERE), ("absolute+relative", SPECIALS)],
)
def test_our_encoder_goes_out(positions, specials, side):
    run = small("mae_lm", positions=positions, specials=specials, row_tokens=150, vocabulary=71)
    encoder = pretrainer_of(run).encoder.eval()
    kind = stock.family(run.shape)
    assert kind != "latemask"
    wanted, made = {"absolute": ("roberta", RobertaModel), "absolute+relative": ("mpnet", MPNetModel),
                    "rotary": ("roformer", RoFormerModel)}[positions]  # fmt: skip
    assert kind == wanted
    config = stock.config_of(run, kind, fills_masks=False)
    theirs = made(config).double().eval()
    theirs.load_state_dict(stock.to_stock(encoder.state_dict(), run.shape, kind))
    ids, real = rows(specials, 150, side)
    assert_same_states(encoder, theirs, ids, real)
    assert theirs.get_input_embeddings().num_embeddings == 71
    back = stock.from_transformers(theirs, specials).state_dict()
    for name, tensor in encoder.state_dict().items():
        expected = tensor[:71] if name == "tokens.weight" else tensor
        assert torch.equal(back[name][: len(expected)], expected), name


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, "roberta"),
        ({"positions": "absolute+relative"}, "mpnet"),
        ({"positions": "absolute+relative", "relative_buckets": 64}, "latemask"),
        ({"positions": "absolute+relative", "relative_distance": 256}, "latemask"),
        ({"positions": "absolute+relative", "specials": ELSEWHERE}, "latemask"),
        ({"positions": "rotary"}, "roformer"),
        ({"positions": "rotary", "specials": ELSEWHERE}, "roformer"),
        ({"positions": "rotary", "norm": "pre"}, "latemask"),
        ({"norm": "pre"}, "latemask"),
        ({"specials": ELSEWHERE}, "roberta"),
    ],
)
def test_a_stock_class_is_chosen_only_where_it_computes_the_same(change, kind):
    assert stock.family(replace(Shape(), **change)) == kind


def test_buckets_are_mpnet_s():
    offsets = torch.arange(-511, 512)
    assert torch.equal(relative_buckets(512, 32, 128), MPNetEncoder.relative_position_bucket(offsets))
    assert not torch.equal(relative_buckets(512, 32, 256), MPNetEncoder.relative_position_bucket(offsets))


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (lambda: roberta(SPECIALS, hidden_act="gelu_new"), "hidden_act"),
        (lambda: mpnet(relative_attention_num_buckets=64), "relative_attention_num_buckets"),
        (lambda: roberta(ELSEWHERE), "specials.pad"),
        (lambda: roformer(rotary_value=True), "rotary_value"),
        (lambda: roformer(embedding_size=16), "embedding_size"),
        (lambda: roformer(hidden_act="relu"), "hidden_act"),
        (lambda: roformer(pad_token_id=0), "specials.pad"),
        (lambda: roformer(is_decoder=True), "is_decoder"),
        (lambda: randomised(roformer()), "other angles"),
        (lambda: roberta(SPECIALS, is_decoder=True), "is_decoder"),
        (lambda: BertForMaskedLM(bert_config()), "BertModel"),
    ],
)
def test_what_would_compute_something_else_does_not_come_in(model, found):
    with pytest.raises(Refusal, match=found):
        stock.from_transformers(model(), SPECIALS)


def bert_config() -> BertConfig:
    return BertConfig(vocab_size=70, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                      max_position_embeddings=40, pad_token_id=1)  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: roberta(ELSEWHERE),
        lambda: randomised(RobertaForMaskedLM(roberta(SPECIALS).config)),
        mpnet,
        lambda: randomised(BertForMaskedLM(bert_config())),
        lambda: randomised(DistilBertModel(DistilBertConfig(vocab_size=70, dim=32, n_layers=2, n_heads=4,
                                                            hidden_dim=48, pad_token_id=1))),
    ],
    ids=["roberta", "roberta with a head", "mpnet", "bert with a head", "distilbert"],
)  # fmt: skip
def test_any_hugging_face_encoder_is_called_as_ours(make, tmp_path):
    model = make()
    model.float().save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path).double()
    base = model.base_model.double()
    assert not encoder.training
    assert encoder.shape.width == 32
    ids = torch.randint(10, 70, (1, 9), generator=torch.Generator().manual_seed(0))
    pad = torch.full((1, 4), int(base.config.pad_token_id))
    with torch.no_grad():
        alone = base(input_ids=ids).last_hidden_state
        torch.testing.assert_close(encoder(ids), alone, **EXACT)
        right = encoder(torch.cat([ids, pad], 1), torch.arange(13)[None] < 9)
        torch.testing.assert_close(right[:, :9], alone, **EXACT)
        if "position_ids" in inspect.signature(base.forward).parameters:
            left = encoder(torch.cat([pad, ids], 1), torch.arange(13)[None] >= 4)
            torch.testing.assert_close(left[:, 4:], alone, **EXACT)
        assert len(encoder.states(ids)) == base.config.num_hidden_layers + 1
        torch.testing.assert_close(encoder.states(ids)[-1], alone, **EXACT)


def test_a_row_that_is_too_long_is_refused_and_the_longest_is_not(tmp_path):
    roberta(SPECIALS, row_tokens=512).float().save_pretrained(tmp_path / "roberta")
    write_run(tmp_path / "run", small("mlm", row_tokens=512), byte_level())
    for encoder in (load_encoder(tmp_path / "roberta"), load_encoder(tmp_path / "run")):
        assert encoder(torch.full((1, 512), 20)).shape == (1, 512, 32)
        with pytest.raises(Refusal, match="513 tokens; wanted at most 512"):
            encoder(torch.full((1, 513), 20))


def damaged(folder: Path, change) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda tensors: tensors.pop(QUERY), f"missing {QUERY}"),
        (lambda tensors: tensors.update({"encoder.layer.9.bias": torch.ones(2)}), "unexpected encoder.layer.9.bias"),
        (lambda tensors: tensors.update({QUERY: torch.ones(32, 31)}), f"misshapen {QUERY}"),
        (lambda tensors: tensors.update({QUERY.replace("query", "frage"): tensors.pop(QUERY)}), "frage"),
    ],
    ids=["missing", "unexpected", "misshapen", "renamed"],
)  # fmt: skip
def test_every_weight_has_to_find_its_place(change, found, tmp_path):
    roberta(SPECIALS).float().save_pretrained(tmp_path)
    with pytest.raises(Refusal, match=found):
        load_encoder(damaged(tmp_path, change))


def test_only_a_pooler_may_be_missing(tmp_path):
    roberta(SPECIALS).float().save_pretrained(tmp_path)
    damaged(tmp_path, lambda tensors: [tensors.pop(f"pooler.dense.{part}") for part in ("weight", "bias")])
    ids = torch.randint(10, 70, (2, 8))
    with torch.no_grad():
        assert torch.equal(load_encoder(tmp_path)(ids), load_encoder(tmp_path)(ids))


def test_an_encoder_without_head_is_no_masked_model(tmp_path):
    roberta(SPECIALS).float().save_pretrained(tmp_path)
    byte_level().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(Refusal, match=r"RobertaModel, an encoder alone; wanted a model that fills masks"):
        load_masked_model(tmp_path)


def test_pickled_weights_are_not_read(tmp_path):
    model = roberta(SPECIALS).float()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(Refusal):
        load_encoder(tmp_path)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda folder: folder / "runs" / "x", "no such folder"),
        (lambda folder: folder, "no checkpoint and no config.json"),
        (lambda folder: folder / "file", "a file"),
        (lambda folder: "not/a/name", "no such folder"),
    ],
)
def test_what_is_no_model_is_refused_before_anything_is_fetched(make, found, tmp_path):
    (tmp_path / "file").touch()
    for load in (load_encoder, load_pretrained, load_masked_model, load_tokenizer_of):
        with pytest.raises(Refusal, match=found):
            load(make(tmp_path))


def test_a_config_that_transformers_does_not_know_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    with pytest.raises(Refusal, match="no_such_type"):
        load_encoder(tmp_path)


def test_code_beside_weights_is_not_run(tmp_path):
    (tmp_path / "modeling_bad.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "modeling_bad.Config", "AutoModel": "modeling_bad.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bad", "auto_map": auto_map}))
    with pytest.raises(Refusal):
        load_encoder(tmp_path)


def test_a_run_and_its_step_folder_load_alike(tmp_path):
    step = write_run(tmp_path / "run", small("mae_lm"), byte_level())
    ids = torch.randint(10, 60, (2, 8))
    with torch.no_grad():
        assert torch.equal(load_encoder(tmp_path / "run")(ids), load_encoder(step)(ids))
        assert torch.equal(load_pretrained(step).encoder(ids), load_encoder(step)(ids))
    assert isinstance(load_masked_model(step), MaskedModel)
    assert load_tokenizer_of(tmp_path / "run").fingerprint == byte_level().fingerprint


def test_vectors_are_means_over_each_text_alone_in_the_order_of_the_texts(tmp_path):
    write_run(tmp_path / "run", small("mae_lm"), byte_level())
    encoder, tokenizer = load_encoder(tmp_path / "run"), load_tokenizer_of(tmp_path / "run")
    texts = ["the cat and the dog", "", "a", "the " * 100, "dog <mask> </s> cat"]
    vectors = encode(texts, tmp_path / "run", batch_rows=2)
    for text, vector in zip(texts, vectors, strict=True):
        ids = tokenizer.encode_batch([text])[0].tolist()[:34]
        row = torch.tensor([[tokenizer.specials.bos, *ids, tokenizer.specials.eos]])
        with torch.no_grad():
            torch.testing.assert_close(vector, encoder(row)[0].mean(0), rtol=0, atol=1e-5)
    assert encode([], tmp_path / "run").shape == (0, 32)
    with pytest.raises(Refusal, match="one text"):
        encode("one text", tmp_path / "run")
    with pytest.raises(Refusal, match="texts: found None, which is no text; wanted texts"):
        encode(["a", None], tmp_path / "run")  # type: ignore[list-item]


def test_masks_are_filled_with_the_model_s_probabilities(tmp_path):
    write_run(tmp_path / "run", small("mae_lm"), byte_level())
    model, tokenizer = load_masked_model(tmp_path / "run"), load_tokenizer_of(tmp_path / "run")
    bos, eos, mask = tokenizer.specials.bos, tokenizer.specials.eos, tokenizer.specials.mask
    before, between, behind = (ids.tolist() for ids in tokenizer.encode_batch(["the cat", "and the", " dog</s>"]))
    ids = torch.tensor([[bos, *before, mask, *between, mask, *behind, eos]])
    with torch.no_grad():
        chances = model(ids).softmax(-1)
    found = fill("the cat <mask>and the <mask> dog</s>", tmp_path / "run", top=3)
    for guesses, row in zip(found, chances, strict=True):
        assert [guess.id for guess in guesses] == row.topk(3).indices.tolist()
        torch.testing.assert_close(torch.tensor([guess.probability for guess in guesses]), row.topk(3).values)
        assert guesses[0] == Guess(tokenizer.decode([guesses[0].id]), guesses[0].id, guesses[0].probability)
    everything = fill("the <mask>", tmp_path / "run", top=10_000)[0]
    assert sum(guess.probability for guess in everything) == pytest.approx(1, abs=1e-5)
    assert len(everything) == tokenizer.vocabulary


@pytest.mark.parametrize(
    ("text", "top", "found"),
    [
        ("no mask here", 5, "at least one <mask>"),
        ("the " * 60 + "<mask>", 5, "tokens; wanted at most"),
        ("<mask>", 0, "top"),
    ],
)
def test_texts_that_cannot_be_filled_are_refused(text, top, found, tmp_path):
    write_run(tmp_path / "run", small("mae_lm"), byte_level())
    with pytest.raises(Refusal, match=found):
        fill(text, tmp_path / "run", top)


def test_a_model_that_rewrites_rows_fills_no_masks(tmp_path):
    write_run(tmp_path / "run", small("decoder_causal_cross"), byte_level())
    with pytest.raises(Refusal, match="rewrites"):
        fill("the <mask>", tmp_path / "run")


def test_a_space_before_a_mask_belongs_to_the_word_where_the_tokenizer_ties_it():
    tied, apart = byte_level(), character_level()
    assert ties_spaces(tied)
    assert not ties_spaces(apart)
    one, other, literal = masked_ids(["the \n<mask> cat", "the<mask> cat", "the <mask> </s>"], tied)
    assert one == other
    assert tied.specials.eos not in literal
    spaced, close = masked_ids(["a <mask>b", "a<mask>b"], apart)
    assert len(spaced) == len(close) + 1


def test_options_and_the_package_need_no_torch():
    code = (
        "import latemask.hf, sys; latemask.hf.ExportOptions('a', 'b'); latemask.Run; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_recipes_of_the_papers_find_their_class():
    assert stock.family(recipe("mae_lm_base").shape) == "mpnet"
    assert stock.family(recipe("mae_lm_base_plus").shape) == "latemask"
    assert stock.family(recipe("three_ml_self_base").shape) == "roberta"
    assert stock.is_plain_mlm(recipe("mlm_base"))
    assert stock.is_plain_mlm(recipe("mlm_80_10_10_base"))
    assert not any(stock.is_plain_mlm(recipe(f"{name}_base")) for name in ("three_ml", "mae_lm", "delta", "gradual"))


def test_a_name_that_is_no_folder_is_tried_at_the_hub_once(monkeypatch):
    """Without a network: one attempt for all files, then the cache alone, and both readings in the message."""
    attempts = []

    def unreachable(url: str, **options: object) -> None:
        attempts.append(url)
        raise ConnectionError("no route")

    loading._hub_answers.cache_clear()
    monkeypatch.setattr(loading, "get_session", lambda: SimpleNamespace(head=unreachable))
    try:
        for load in (load_encoder, load_masked_model, load_tokenizer_of):
            with pytest.raises(Refusal, match=r"no such folder, nor .*hub cannot be reached"):
                load("no-such-folder-here")
        assert len(attempts) == 1
        assert loading._options("no-such-folder-here")["local_files_only"]
    finally:
        loading._hub_answers.cache_clear()
