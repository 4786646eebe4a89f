"""``latemask rank``: the effective rank of every layer's representations, with and without [MASK] in the input.

Figure 1(a) compares all tokens of masked input (H) with real tokens of clean input (H tilde, also Table 3); the real
tokens of the masked input are the control that tells how much of the gap is [MASK] itself. Figure 1(b) is the rank of
the [MASK] representations. Uncentred as in section 2.2, centred beside it; one pass, a Gram matrix a layer and set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from latemask import console
from latemask.study.effective_rank import GramMatrix, is_capped
from latemask.study.energy import check_tau
from latemask.study.passes import Pass, Subject, open_subject
from latemask.study.sample import Sample

SETS = {
    "masked_input": "masked input, all tokens",
    "masked_input_real": "masked input, real tokens",
    "clean_input": "clean input",
    "masks": "[MASK]",
}
"""Keys of the JSON and what a person reads: H, its control, H tilde, Figure 1(b)."""


class Moments:
    """Gram matrices of every layer: real tokens of clean input, real and [MASK] tokens of masked input."""

    def __init__(self, width: int, depth: int):
        self.clean, self.real, self.mask = ([GramMatrix(width) for _ in range(depth + 1)] for _ in range(3))

    def add(self, both: Pass) -> None:
        """Take in one pass."""
        for gram, layer in zip(self.clean, both.clean, strict=True):
            gram.add(layer.x[layer.is_real])
        for real, mask, layer in zip(self.real, self.mask, both.masked or [], strict=False):
            real.add(layer.x[layer.is_real])
            mask.add(layer.x[layer.is_mask])

    @property
    def depth(self) -> int:
        return len(self.clean) - 1

    def sets(self, layer: int) -> dict[str, GramMatrix]:
        """The Gram matrices of ``SETS``; empty ones where the encoder sees no mask there."""
        return {
            "masked_input": self.real[layer] + self.mask[layer],
            "masked_input_real": self.real[layer],
            "clean_input": self.clean[layer],
            "masks": self.mask[layer],
        }


def moments(subject: Subject) -> Moments:
    """Stream a subject's passes."""
    found = Moments(subject.width, subject.depth)
    for both in subject.passes():
        found.add(both)
    return found


def ranks(found: Moments, tau: float = 0.9) -> list[dict[str, Any]]:
    """For each layer and set of ``SETS``: rank, rank centred, vectors, and whether these are so few that more would
    show a higher rank (``few_vectors``), and which of the two (``capped``); None for a set without vectors. Raises
    ``Refusal`` for a tau outside 0..1."""
    layers = []
    for number in range(found.depth + 1):
        layer: dict[str, Any] = {"layer": number}
        for name, gram in found.sets(number).items():
            layer[name] = None
            if gram.count:
                both = {"rank": gram.rank(tau), "centred": gram.rank(tau, centred=True)}
                capped = [which for which, rank in both.items() if is_capped(rank, gram.count, gram.width)]
                layer[name] = {**both, "vectors": gram.count, "few_vectors": bool(capped), "capped": capped}
        layers.append(layer)
    return layers


def rank_study(sample: Sample, tau: float = 0.9) -> dict[str, Any]:
    """What ``latemask rank`` says, as plain numbers. Raises ``Refusal`` where the model or the data cannot be read."""
    check_tau(tau)
    subject = open_subject(sample)
    return {"kind": "rank", "tau": tau, **described(sample, subject), "layers": ranks(moments(subject), tau)}


def show(study: dict[str, Any]) -> None:
    """Print the table of a study."""

    def cell(found: dict[str, Any] | None) -> str:
        if found is None:
            return "n/a"
        rank, centred = (f"{found[which]}{'*' * (which in found['capped'])}" for which in ("rank", "centred"))
        return f"{rank} ({centred})"

    console.table(
        f"{study['model']}: rank_{study['tau']:g} of {study['width']} dimensions (centred), "
        f"{100 * study['rate']:.3g}% masked",
        ("layer", *SETS.values()),
        [(str(layer["layer"]), *(cell(layer[name]) for name in SETS)) for layer in study["layers"]],
    )
    last = study["layers"][-1]
    counts = ", ".join(f"{SETS[name]} {last[name]['vectors']:,}" for name in SETS if last[name])
    console.say(f"vectors: {counts}; padding left out, special tokens {study['specials']}")
    console.say(f"rank: how many directions carry {study['tau']:.0%} of the energy")
    console.say("in parentheses: the same of the vectors with their mean taken away")
    if any(layer[name] and layer[name]["few_vectors"] for layer in study["layers"] for name in SETS):
        console.say("* more than a tenth of the number of vectors: more tokens would show a higher rank")
    layers = study["layers"]
    say_what_is_missing(study, [layer["masked_input_real"] for layer in layers], [layer["masks"] for layer in layers])


def say_what_is_missing(study: dict[str, Any], real: Sequence[object], masks: Sequence[object]) -> None:
    """Why masked sets are n/a. ``real`` and ``masks``: what each layer says of them, None where there is no vector."""
    if study["without_masks"]:
        console.say(f"n/a: {study['without_masks']}")
        return
    rate = f"at a rate of {study['rate']:g}"
    if masks[-1] is None:
        console.say(f"n/a: no token is shown as [MASK] {rate}")
    elif None in masks:
        console.say("n/a: no [MASK] has joined before that layer")
    if real[-1] is None:
        console.say(f"n/a: no real token is left beside [MASK] {rate}")


def described(sample: Sample, subject: Subject) -> dict[str, Any]:
    """What a study was made of, for its JSON."""
    return {
        "model": sample.model,
        **sample.asked,
        "sees_masks": subject.sees_masks,
        "without_masks": subject.without_masks,
        "width": subject.width,
        "depth": subject.depth,
    }
