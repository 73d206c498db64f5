"""Compares what whole tables say in the paper and in a study, whose cells and backbones may differ.

Counts printed values without a test, so a direction can be chance. Equally many cells above and below count as a
direction of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from residual_mass.core.settings import length_and_variant, tokens_of
from residual_mass.paper.comparison.comparability import obstacles, other_settings
from residual_mass.paper.readers.accounting_file import METHODS
from residual_mass.paper.table import Cell, Place
from residual_mass.paper.tables import accounting_table, runtime_table, training_cost_table
from residual_mass.paper.tables.tally import Texts, tally_by_family
from residual_mass.paper.titles import family_title
from residual_mass.study.specs import ComparisonSpec

COLUMNS = "table family statement published ours same_direction note".split()
MISMATCH = "cross_length_mismatch"
ABLATIONS = ("dphi_ablation", "loss_ablation")
COMPARED_WITH = {"topk": "TopK", "topk_phi_nosub": "NoSub"}
"""Methods with which completion is compared."""
COMMON_WORDS = "cwe"
"""The only corpus of accounting rows that is not running text."""


@dataclass(frozen=True)
class Finding:
    """What a table says in words or numbers, and its sign as `direction`, None if it has none."""

    text: str
    direction: int | None


Findings = dict[tuple[str, str], Finding]
"""Findings by family of cells and statement."""


def picture(
    published: Mapping[str, Texts], ours: Mapping[str, Sequence[Cell]], spec: ComparisonSpec
) -> Iterator[dict[str, str]]:
    """Yields one row per statement: the findings of the paper and of the study, and whether they have the same sign.

    Args:
        published, ours: values by label of their table; a study may lack tables.
    """
    for table, texts in published.items():
        values = ours.get(table, ())
        own_texts = {cell.place: cell.text for cell in values}
        notes = _notes(values, spec)
        if table in ABLATIONS:
            theirs, own = _ranks(texts, own_texts)
        else:
            theirs, own = _findings(table, texts), _findings(table, own_texts)
        for family, statement in dict.fromkeys([*theirs, *own]):
            pair = theirs.get((family, statement)), own.get((family, statement))
            yield {
                "table": table,
                "family": family,
                "statement": statement,
                **{name: each.text if each else "" for name, each in zip(("published", "ours"), pair, strict=True)},
                "same_direction": _same(*pair),
                "note": notes.get(family, "not run"),
            }


def tau_b(first: Sequence[Decimal], second: Sequence[Decimal]) -> float | None:
    """Returns Kendall's rank correlation of two series of equal length, corrected for ties; None if one is constant."""
    signs = [
        (_sign(a - b), _sign(c - d)) for (a, c), (b, d) in itertools.combinations(zip(first, second, strict=True), 2)
    ]
    untied = sum(x != 0 for x, _ in signs) * sum(y != 0 for _, y in signs)
    return sum(x * y for x, y in signs) / math.sqrt(untied) if untied else None


def _findings(table: str, texts: Texts) -> Findings:
    if table == accounting_table.LABEL:
        return _accounting(texts)
    if table in runtime_table.PUBLISHED:
        return _latencies(texts)
    if table == training_cost_table.LABEL:
        return {}  # one number per backbone
    if table == MISMATCH:
        return _mismatch(texts)
    return _changes(texts)


def _changes(texts: Texts) -> Findings:
    """Counts completion against other methods. All cells have the main maps, so their label is dropped."""
    scores = {replace(place, maps=None): text for place, text in texts.items()}
    found: Findings = {}
    for method, name in COMPARED_WITH.items():
        for family, counted in tally_by_family(scores, method).items():
            sides = f"{counted.wins} / {counted.ties} / {counted.losses}"
            mean, metric = f"{counted.mean_change:+z.3f}", counted.metric
            statement = f"cells with TopK+phi {metric.better_side} / equal / {metric.worse_side} {name}"
            found[family, statement] = Finding(sides, _sign(counted.wins - counted.losses))
            found[family, f"mean change from {name} to TopK+phi"] = Finding(mean, _sign(Decimal(mean)))
    return found


def _mismatch(texts: Texts) -> Findings:
    """Compares maps, at lengths that they were trained for and at longer ones, with TopK at the same length."""
    worse: dict[tuple[str, str], list[bool]] = {}
    for place, text in texts.items():
        topk = replace(place, method="topk", maps=None)
        if place.maps is None or topk not in texts:
            continue
        trained, _ = length_and_variant(place.maps)
        use = "beyond" if tokens_of(trained) < tokens_of(place.length) else "within"
        statement = f"cells {place.metric.worse_side} TopK, of those with maps used {use} their length"
        is_worse = place.metric.better(Decimal(texts[topk]), Decimal(text))
        worse.setdefault((_family(place), statement), []).append(is_worse)
    return {key: _share(each) for key, each in sorted(worse.items())}


def _accounting(texts: Texts) -> Findings:
    """Compares the errors of each row, a corpus at a length."""
    rows: dict[Place, dict[str, Decimal]] = {}
    for place, text in texts.items():
        if place.quantity in METHODS:
            rows.setdefault(replace(place, quantity=""), {})[place.quantity] = Decimal(text)
    found: dict[tuple[str, str], list[bool]] = {}
    for place, errors in rows.items():
        topk, nosub, sub = errors["e_topk"], errors["e_nosub"], errors["e_sub"]
        statements = {
            "rows in which TopK+phi has the lowest error of the three": sub < min(topk, nosub),
            "rows in which NoSub has a lower error than TopK": nosub < topk,
        }
        for statement, holds in statements.items():
            found.setdefault((_family(place), statement), []).append(holds)
    return {key: _share(each) for key, each in found.items()}


def _latencies(texts: Texts) -> Findings:
    """Compares decode steps of TopK+phi with those of full attention, by sign and ratio."""
    rows: dict[tuple[str, str], dict[str, Decimal]] = {}
    for place, text in texts.items():
        if place.quantity == runtime_table.STEP:
            rows.setdefault((_family(place), place.length), {})[place.method] = Decimal(text)
    shorter: dict[str, list[bool]] = {}
    ratios: dict[str, list[str]] = {}
    for family, length in sorted(rows, key=lambda row: tokens_of(row[1])):
        steps = rows[family, length]
        if not {"topk_phi", "full"} <= steps.keys():  # one did not fit into memory
            continue
        shorter.setdefault(family, []).append(steps["topk_phi"] < steps["full"])
        ratios.setdefault(family, []).append(f"{length} {steps['topk_phi'] / steps['full']:.2f}")
    found: Findings = {}
    for family, each in shorter.items():
        found[family, "contexts at which a step of TopK+phi is shorter than one of Full"] = _share(each)
        found[family, "step of TopK+phi over one of Full, by context"] = Finding(", ".join(ratios[family]), None)
    return found


def _ranks(published: Texts, ours: Texts) -> tuple[Findings, Findings]:
    """Ranks the rows of an ablation, and correlates a study's order with the paper's for each backbone, over the rows
    that both have.
    """
    theirs: Findings = {}
    own: Findings = {}
    several = len({place.backbone for place in ours}) > 1
    order = "rows, best first"
    published_scores = {family: scores for (_, family), scores in _scores(published).items()}
    for family, scores in published_scores.items():
        theirs[family, order] = Finding(_order(scores), None)
    for (backbone, family), scores in _scores(ours).items():
        which = f" ({backbone})" if several else ""
        own[family, order + which] = Finding(_order(scores), None)
        shared = [row for row in published_scores.get(family, {}) if row in scores]
        tau = tau_b([published_scores[family][row] for row in shared], [scores[row] for row in shared])
        if tau is not None:
            statement = f"rank correlation with the published order (tau-b, {len(shared)} rows){which}"
            theirs[family, statement] = Finding("", 1)
            own[family, statement] = Finding(f"{tau:+z.3f}", _sign(tau))
    return theirs, own


def _scores(texts: Texts) -> dict[tuple[str, str], dict[str, Decimal]]:
    """Returns how good every row is by backbone and family; row names do not depend on the maps' training length."""
    scores: dict[tuple[str, str], dict[str, Decimal]] = {}
    for place, text in texts.items():
        _, variant = length_and_variant(place.maps or "")
        row = variant or ("ours" if place.maps else place.method)
        scores.setdefault((place.backbone, _family(place)), {})[row] = place.metric.goodness(Decimal(text))
    return scores


def _order(scores: Mapping[str, Decimal]) -> str:
    """Orders row names, best first: `a > b = c`."""
    ranked = itertools.groupby(sorted(scores, key=lambda row: -scores[row]), key=lambda row: scores[row])
    return " > ".join(" = ".join(rows) for _, rows in ranked)


def _share(holds: Sequence[bool]) -> Finding:
    return Finding(f"{sum(holds)} of {len(holds)}", _sign(2 * sum(holds) - len(holds)))


def _notes(values: Iterable[Cell], spec: ComparisonSpec) -> dict[str, str]:
    """Returns why a family's values are not comparable one by one with the paper's; empty if they are."""
    found: dict[str, dict[str, None]] = {}
    settings: dict[str, set[str]] = {}
    for value in values:
        family = _family(value.place)
        found.setdefault(family, {}).update(dict.fromkeys(obstacles(value)))
        settings.setdefault(family, set()).update(other_settings(value, spec))
    for family, keys in settings.items():
        if keys:
            found[family][f"{len(keys)} other {'setting' if len(keys) == 1 else 'settings'}"] = None
    return {family: "; ".join([*reasons, "directions only"] if reasons else []) for family, reasons in found.items()}


def _family(place: Place) -> str:
    if place.implementation:
        return f"{place.implementation}, batch {place.batch}"
    if place.corpus:
        return "common words" if place.corpus == COMMON_WORDS else "running text"
    return family_title(place)


def _same(theirs: Finding | None, own: Finding | None) -> str:
    if theirs is None or own is None or theirs.direction is None or own.direction is None:
        return ""
    return "yes" if theirs.direction == own.direction else "no"


def _sign(value: Decimal | float) -> int:
    return (value > 0) - (value < 0)
