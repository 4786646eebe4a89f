"""A run becomes a folder that transformers loads: a stock class where one computes the same, else with its own code.

Everything is written aside, loaded in a fresh process, compared, and only then given its name.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from latemask.config import refuse_rewriting
from latemask.console import say
from latemask.errors import Refusal
from latemask.hf.card import TAG, card, warn_of_frequencies
from latemask.hf.checksums import write_sums
from latemask.hf.options import Kind
from latemask.hf.places import of_no_run
from latemask.hf.source import Source
from latemask.text.tokenizer import load_tokenizer
from latemask.training import checkpoint, journal
from latemask.writing import check_free, written_aside

if TYPE_CHECKING:
    from latemask.hf.stock import Family
    from latemask.hf.verification import Exported
    from latemask.model.pretrainer import Pretrainer

WEIGHTS, CARD = "model.safetensors", "README.md"
MARK = f"- {TAG}"
"""The line of an export's card that no other model's has: else other models of transformers have the same files."""
CODE = "modeling_latemask"


def export(folder: Path | str, out: Path | str, *, kind: Kind = "encoder", overwrite: bool = False) -> Exported:
    """Write the run or step folder ``folder`` to ``out`` for transformers, verified in a fresh process.

    ``kind`` "encoder": ``RobertaModel``, ``MPNetModel``, ``RoFormerModel`` (rotary positions) or, where none of them
    computes this encoder, ``LatemaskModel`` with its code beside the weights. "masked-lm": the same with what fills
    masks, for plain MLM the family's ``...ForMaskedLM``, else ``LatemaskForMaskedLM``. An encoder's folder is one for
    sentence-transformers too, which gives the vectors of ``latemask.encode``.

    Raises ``Refusal``, and leaves nothing under ``out``, where the verification fails, where a run that rewrites rows
    is to fill masks, where a run's newest checkpoint is damaged (to export an older one, name its step folder), and
    where ``out`` exists (with ``overwrite``: where it is not an export).

    >>> exported = latemask.hf.export("runs/x", "out")
    Writing out, then loading it in a fresh process to check it: half a minute or so
    >>> exported.model_class
    'MPNetModel'
    """
    step, out = Source.of(folder, takes_older=False).step, Path(out)
    if step is None:
        raise Refusal(folder, of_no_run(folder), "a run folder or a step folder")
    check_free(out, overwrite, CARD, MARK)
    run, tokenizer = checkpoint.read_run(step), load_tokenizer(step / checkpoint.TOKENIZER)
    fills_masks = kind == "masked-lm"
    if tokenizer.vocabulary > run.shape.vocabulary or tokenizer.specials != run.shape.specials:
        raise Refusal(step / checkpoint.TOKENIZER, "another tokenizer than the run's", f"{run.shape.vocabulary} ids")
    if fills_masks:
        refuse_rewriting(run)
    from latemask.hf import stock
    from latemask.hf.sentence import write_sentence
    from latemask.hf.tokenization import write_tokenizer
    from latemask.hf.verification import Exported, verify
    from latemask.model.masked_model import MaskedModel

    warn_of_frequencies(step, journal.read_checked)  # what the card could not be made of is refused before the work
    pretrainer = checkpoint.read_pretrainer(step)
    model = MaskedModel(pretrainer) if fills_masks else pretrainer.encoder
    family = stock.family(run.shape)
    if fills_masks and not stock.is_plain_mlm(run):
        family = "latemask"
    with written_aside(out) as aside:
        say(f"Writing {out}, then loading it in a fresh process to check it: half a minute or so")
        _write_model(aside, pretrainer, family, fills_masks)
        write_tokenizer(aside, tokenizer, run.shape.row_tokens, fills_masks=fills_masks)
        if not fills_masks:
            write_sentence(aside, run.shape)
        has_code = family == "latemask"
        verified = verify(aside, model, tokenizer, trusts_code=has_code)
        text = card(step, run, verified, tokenizer.special_names, fills_masks=fills_masks, has_code=has_code)
        (aside / CARD).write_text(text, encoding="utf-8")
        write_sums(aside, free=(CARD,))
    return Exported(**vars(verified), folder=out)


def _write_model(folder: Path, pretrainer: Pretrainer, family: Family, fills_masks: bool) -> None:
    from safetensors.torch import save_file

    from latemask.hf import modeling_latemask, stock

    config = stock.config_of(pretrainer.run, family, fills_masks)
    name = stock.PREFIX[family] + ("ForMaskedLM" if fills_masks else "Model")
    if family == "latemask":
        classes = {"AutoConfig": "LatemaskConfig", "AutoModel": "LatemaskModel"}
        classes |= {"AutoModelForMaskedLM": name} if fills_masks else {}
        config.auto_map = {auto: f"{CODE}.{own}" for auto, own in classes.items()}
        shutil.copyfile(modeling_latemask.__file__, folder / f"{CODE}.py")
    config.architectures = [name]
    config.save_pretrained(folder)
    tensors = stock.tensors_of(pretrainer, family, fills_masks)
    plain = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(plain, folder / WEIGHTS, metadata={"format": "pt"})
