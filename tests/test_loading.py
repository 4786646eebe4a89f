"""Whatever is loaded: one weight that is missing, renamed, misshapen or too many is an error that lists it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from latemask import load_encoder, load_pretrained
from latemask.downstream.finetune import Model
from latemask.downstream.heads import FineTuned
from latemask.downstream.saved import FACTS, HEAD
from latemask.downstream.saving import load_finetuned, save_finetuned
from latemask.downstream.tasks import own_task
from latemask.errors import Refusal
from latemask.hf import export
from latemask.hf.checksums import SUMS
from latemask.hf.loading import load_masked_model, load_tokenizer_of
from latemask.model.pretrainer import Pretrainer
from latemask.training import checkpoint
from latemask.training.optimizer import load_optimizer_tensors, make_optimizer, optimizer_tensors
from samples import SYSTEM_NAMES, small
from test_hf import mpnet, roberta
from trained import byte_level, write_run

Tensors = dict[str, Tensor]
SPECIALS = small("mlm").shape.specials


def removed(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def renamed(tensors: Tensors, name: str) -> Tensors:
    return removed(tensors, name) | {f"{name}_": tensors[name]}


def reshaped(tensors: Tensors, name: str) -> Tensors:
    return tensors | {name: torch.cat([tensors[name], tensors[name]])}


def added(tensors: Tensors, name: str) -> Tensors:
    return tensors | {f"{name}_": torch.zeros(3)}


DAMAGES = [removed, renamed, reshaped, added]
damages = pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)


def damage_file(path: Path, damage: Callable[[Tensors, str], Tensors], name: str) -> None:
    save_file({key: part.clone() for key, part in damage(load_file(path), name).items()}, path, {"format": "pt"})


@damages
@pytest.mark.parametrize("system", SYSTEM_NAMES)
def test_every_weight_of_every_system(system, damage):
    model = Pretrainer(small(system))
    tensors = model.state_dict()
    for name in tensors:
        with pytest.raises(Refusal) as refused:
            checkpoint.load_strictly(model, damage(tensors, name), Path("here"))
        assert name in refused.value.found
        assert refused.value.found.count(",") <= 4, "this one alone"
    checkpoint.load_strictly(model, tensors, Path("here"))


@damages
def test_every_tensor_of_the_optimizer(damage):
    run = small("mae_lm")
    model = Pretrainer(run)
    optimizer = make_optimizer(model, run.training)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = optimizer_tensors(optimizer)
    for name in tensors:
        odd = (
            damage(tensors, name) if tensors[name].ndim or damage is not reshaped else tensors | {name: torch.zeros(2)}
        )
        with pytest.raises(Refusal) as refused:
            load_optimizer_tensors(model, make_optimizer(model, run.training), odd)
        assert name in refused.value.found


@damages
@pytest.mark.parametrize(
    ("file", "name", "readers"),
    [
        (
            checkpoint.ENCODER,
            "tokens.weight",
            (checkpoint.read_encoder, checkpoint.read_pretrainer),
        ),
        (checkpoint.REST, "head.dense.weight", (checkpoint.read_pretrainer,)),
        (checkpoint.REST, "mask_vector", (checkpoint.read_pretrainer,)),
    ],
)
def test_a_step_folder(file, name, readers, damage, tmp_path):
    """The readers list it; whoever comes from outside is stopped by the checksum before."""
    step = write_run(tmp_path / "run", small("three_ml_self"), byte_level())
    damage_file(step / file, damage, name)
    for read in readers:
        with pytest.raises(Refusal, match=name.replace(".", r"\.")):
            read(step)
    for load in (load_encoder, load_pretrained, lambda folder: export(folder, tmp_path / "out")):
        with pytest.raises(Refusal, match=f"{file} differs from its checksum"):
            load(step)
    assert not (tmp_path / "out").exists()


@damages
@pytest.mark.parametrize("make", [lambda: roberta(SPECIALS_1), mpnet], ids=["roberta", "mpnet"])
def test_folders_of_transformers(make, damage, tmp_path):
    """A weight in every place of the network: tables, norms, both kinds of matrices, relative bias."""
    model = make().float()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    names = [name for name in whole if "pooler" not in name and ("layer." not in name or "layer.1." in name)]
    assert len(names) > 15
    for name in names:
        save_file({key: part.clone() for key, part in damage(whole, name).items()}, path, {"format": "pt"})
        with pytest.raises(Refusal) as refused:
            load_encoder(tmp_path)
        assert name in refused.value.found


def test_what_is_no_encoder_is_refused(tmp_path):
    """Such as a decoder, whose first token knows nothing of the others, and a model beside another one's tokenizer."""
    from transformers import GPT2Config, GPT2Model, T5Config, T5Model

    GPT2Model(GPT2Config(vocab_size=70, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    T5Model(T5Config(vocab_size=70, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)).save_pretrained(
        tmp_path / "t5"
    )
    for name, found in (("gpt2", "no token sees those after it"), ("t5", "an encoder with a decoder")):
        with pytest.raises(Refusal, match=found):
            load_encoder(tmp_path / name)
    dead = roberta(SPECIALS_1)
    torch.nn.init.zeros_(dead.encoder.layer[-1].output.LayerNorm.weight)
    dead.save_pretrained(tmp_path / "dead")
    last = load_encoder(tmp_path / "dead")(torch.tensor([[0, 5, 6], [0, 6, 5]]))
    assert torch.equal(last[0], last[1])  # an encoder all the same
    roberta(SPECIALS_1).save_pretrained(tmp_path / "roberta")
    with pytest.raises(Refusal, match="a tokenizer of special tokens alone"):
        load_tokenizer_of(tmp_path / "roberta")
    byte_level().save(tmp_path / "roberta")
    (tmp_path / "roberta" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(Refusal, match=r"ids up to \d+, and 70 rows"):
        load_tokenizer_of(tmp_path / "roberta")


SPECIALS_1 = replace(SPECIALS, bos=0, pad=1, eos=2, unk=3, mask=4)


@damages
def test_a_masked_model_of_transformers_needs_its_head(damage, tmp_path):
    from transformers import RobertaForMaskedLM

    RobertaForMaskedLM(roberta(SPECIALS_1).config).save_pretrained(tmp_path)
    byte_level().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    damage_file(tmp_path / "model.safetensors", damage, "lm_head.dense.weight")
    with pytest.raises(Refusal, match=r"lm_head\.dense\.weight"):
        load_masked_model(tmp_path)


# --- a fine-tuned model -----------------------------------------------------------------------------------------------


class Asked:
    """What saving asks of a problem."""

    def __init__(self, kind: str):
        texts = ("one", "other") if kind == "similarity" else ("text",)
        self.task = replace(own_task(kind, texts, "label", "train", "dev"), labels=("cat", "dog"))


@pytest.fixture(params=["absolute", "absolute+relative", "rotary"])
def finetuned(request, tmp_path) -> Path:
    run = small("mlm", positions=request.param)
    write_run(tmp_path / "run", run, byte_level())
    model = Model.load(tmp_path / "run")
    torch.manual_seed(0)
    save_finetuned(FineTuned(model.encoder, "classification", 2, 0.0), model, Asked("classification"), {},
                   tmp_path / "saved")  # fmt: skip
    load_finetuned(tmp_path / "saved")
    (tmp_path / "saved" / SUMS).unlink()  # what is damaged here is damaged with a purpose
    return tmp_path / "saved"


@damages
def test_a_finetuned_model(finetuned, damage):
    kept = load_file(finetuned / HEAD)
    for name in kept:
        save_file(damage(kept, name), finetuned / HEAD)
        with pytest.raises(Refusal, match=name.replace(".", r"\.")):
            load_finetuned(finetuned)
    save_file(kept, finetuned / HEAD)
    path = finetuned / "model.safetensors"
    name = next(name for name in load_file(path) if name.endswith("weight") and "1." in name)
    damage_file(path, damage, name)
    with pytest.raises(Refusal) as refused:
        load_finetuned(finetuned)
    assert name.split(".", 1)[1] in refused.value.found


def test_what_a_finetuned_model_says_is_checked_by_field(finetuned):
    facts = json.loads((finetuned / FACTS).read_text())
    for changes, named in [
        ({"labels": None}, "labels"),
        ({"labels": [1, 2]}, "labels"),
        ({"task": facts["task"] | {"kind": "poetry"}}, r"task\.kind"),
        ({"task": {name: value for name, value in facts["task"].items() if name != "texts"}}, r"task\.texts"),
        ({"spread": "wide"}, "spread"),
        ({"centre": float("nan")}, "centre"),
    ]:
        (finetuned / FACTS).write_text(json.dumps(facts | changes))
        with pytest.raises(Refusal, match=rf"finetuned\.json: {named}: found"):
            load_finetuned(finetuned)
    for name in ("task", "labels", "centre", "spread"):
        (finetuned / FACTS).write_text(json.dumps({key: value for key, value in facts.items() if key != name}))
        with pytest.raises(Refusal, match=rf"finetuned\.json: {name}: found nothing; wanted this field"):
            load_finetuned(finetuned)
    for content in ("[]", "{", "3"):
        (finetuned / FACTS).write_text(content)
        with pytest.raises(Refusal):
            load_finetuned(finetuned)
    (finetuned / FACTS).write_text(json.dumps(facts))
    (finetuned / HEAD).write_bytes(b"no tensors")
    with pytest.raises(Refusal, match=r"head\.safetensors: found a broken file"):
        load_finetuned(finetuned)


def test_a_head_beside_a_model_that_has_none_is_unexpected(tmp_path):
    write_run(tmp_path / "run", small("mlm", positions="absolute"), byte_level())
    model = Model.load(tmp_path / "run")
    save_finetuned(FineTuned(model.encoder, "similarity", 0, 0.0), model, Asked("similarity"), {}, tmp_path / "saved")
    load_finetuned(tmp_path / "saved")
    (tmp_path / "saved" / SUMS).unlink()
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "saved" / HEAD)
    with pytest.raises(Refusal, match="unexpected bias, unexpected weight"):
        load_finetuned(tmp_path / "saved")
