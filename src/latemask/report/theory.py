"""MAE-LM's section 2.2 and appendix A, measured on models: what lies outside, by layer and at the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from latemask.console import percent
from latemask.report import plots
from latemask.report.studies import FEW, STARRED, by_tau, full_name, masked_so
from latemask.report.tables import Drawing, Table, Value


def theory_parts(studied: Sequence[dict[str, Any]]) -> list[Drawing | Table]:
    """Section 2.2 by layer and at the last layer, and appendix A's bounds."""
    found = [{**study, "name": full_name(study)} for study in studied]
    if not found:
        return []
    parts: list[Drawing | Table] = []
    groups = by_tau([study for study in found if study["sees_masks"]])
    for tau, seeing in groups.items():
        note = f"Leading: those that carry {tau:.4%} of the real tokens' energy.".replace(".0000%", "%")
        few = any(layer["few_vectors"] for study in seeing for layer in study["layers"])
        note = f"{note} {masked_so(seeing)}{f' Hollow: {FEW}.' if few else ''}"
        title = "Energy of [MASK] outside the real tokens' leading directions"
        title = f"{title} (tau {tau:g})" if len(groups) > 1 else title
        end = f"-{tau:g}" if len(groups) > 1 else ""
        parts.append(Drawing(f"outside{end}", title, plots.svg(plots.outside_energy_by_layer(seeing)), note))
    return [*parts, _last_layers(found), _bounds(found[0])]


def _last_layers(found: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[tuple[Value, ...]] = []
    for study in found:
        layer = study["layers"][-1]
        residuals = [layer[name] and percent(layer[name]["share"])
                     for name in ("residual_masked_input", "residual_clean_input")]  # fmt: skip
        shares = [percent(layer[name]) for name in ("masks_outside", "masks_spread_outside", "real_outside")]
        rows.append((study["name"], f"{study['tau']:g}", f"{100 * study['rate']:.4g}%", study["specials"],
                     layer["layer"], layer["real_rank"], *shares, *residuals,
                     "*" if layer["few_vectors"] else None))  # fmt: skip
    columns = ("model", "tau", "masked", "special tokens", "layer", "leading directions", "[MASK] outside",
               "its spread outside", "real outside", "|R|/|H_R|, masked input", "|R|/|H_R|, clean input",
               "few vectors")  # fmt: skip
    note = (
        "Shares of energy outside the leading directions of the real tokens of the same forward pass (section 2.2), "
        "and how far real tokens are from being all one vector. Empty: the encoder sees no [MASK]."
    )
    if any(row[-1] for row in rows):
        note += STARRED
    return Table("Theory at the last layer", columns, tuple(rows), note)


def _bounds(study: Mapping[str, Any]) -> Table:
    names = {"scaled": "attention as sharp, R grows", "inside": "[MASK] inside the row space",
             "outside": "[MASK] partly outside (control)"}  # fmt: skip
    rows: list[tuple[Value, ...]] = [
        (names.get(setting, setting), *(f"{row[key]:.2g}" for key in (
            "residual", "one", "infinity_printed", "infinity_corrected", "cubic")))
        for setting, tried in study["bounds"].items() for row in tried
    ]  # fmt: skip
    note = (
        "Largest left side over right side in random attention layers; above 1 a bound is violated. (10) as printed "
        "breaks; with |R|_inf squared it holds."
    )
    columns = ("setting", "scale of R's entries", "(9)", "(10) printed", "(10) corrected", "cubic")
    return Table("Bounds of appendix A", columns, tuple(rows), note)
