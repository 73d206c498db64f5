"""The protocol of a study, checked in itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from residual_mass import methods
from residual_mass.benchmarks.catalogue import tasks_of
from residual_mass.core.settings import AnchorSpec, Settings, tokens_of
from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.study.checks import beyond, unknown
from residual_mass.study.labels import FIDELITY_BY_BYTES, KERNEL_FIDELITY, METHODS, RESIDUAL_FIGURES
from residual_mass.study.parsing import Slip
from residual_mass.study.sections.diagnostics import Diagnostics, Latencies, Residuals
from residual_mass.study.sections.evaluation import Ablations, Benchmark, Fidelity, Mismatch, Resampling
from residual_mass.study.sections.figures import Figure, figures_of, find
from residual_mass.study.sections.training import Maps, Phi
from residual_mass.study.sections.values import Distinct, Length, Name, OneOrMore, Percent


@dataclass(frozen=True, kw_only=True)
class Study(Settings):
    """Protocol of one study."""

    lengths: OneOrMore[Length]
    """Context lengths that are evaluated."""
    maps: Maps
    budgets: OneOrMore[Percent]
    """Exact-support budgets in percent of the prefix, anchors included."""
    methods: OneOrMore[Name]
    """Evaluated methods: `full`, `topk`, `topk_phi`, `topk_phi_nosub`, and others, also your own (docs/extending.md);
    every method but `full` is run at every budget."""
    anchors: AnchorSpec
    truncate_to: Length
    """Prompts that leave no room for the answer within this length are cut on the left, after the BOS token; results
    say how many."""
    benchmarks: dict[Name, Benchmark]
    """Benchmarks by name: `ruler`, `babilong`, `longbench`; none leaves scores out."""
    fidelity: Fidelity
    mismatch: Mismatch
    ablations: Ablations
    phi: Phi
    diagnostics: Diagnostics
    residuals: Residuals
    runtime: Latencies
    score: Resampling
    tables: Distinct[Annotated[str, Field(pattern=r"^(runtime_[a-z0-9.-]+|[a-z0-9_]+)$", title="table")]]
    """Tables that `all` makes; each has a template in `paper_tables/templates`, and the latencies `runtime_<backbone>`
    share one."""
    figures: Annotated[dict[str, Any], AfterValidator(figures_of)]
    """Figures that `all` makes, each with what it shows; one that is not named is not made."""

    def __post_init__(self) -> None:
        if (slip := next(self._slips(), None)) is not None:
            raise slip

    def lengths_of(self, benchmark: str) -> tuple[str, ...]:
        """Lengths at which a benchmark is evaluated."""
        if benchmark not in self.benchmarks:
            return ()
        return self.benchmarks[benchmark].lengths or self.lengths

    def answered_lengths(self, benchmark: str) -> tuple[str, ...]:
        """Lengths at which the prompts of a benchmark are continued by given answers."""
        if benchmark not in self.fidelity.benchmarks:
            return ()
        return tuple(length for length in self.lengths_of(benchmark) if length in self.fidelity.prompts_at)

    @property
    def evaluated_lengths(self) -> list[str]:
        """Every length at which something is evaluated."""
        lengths = [length for benchmark in self.benchmarks for length in self.lengths_of(benchmark)]
        return list(dict.fromkeys([*self.lengths, *self.fidelity.lengths, *lengths]))

    @property
    def all_lengths(self) -> list[str]:
        """Every length that a backbone of the study meets."""
        return [
            *self.evaluated_lengths, self.truncate_to, *self.maps.trained, *self.diagnostics.lengths,
            *self.residuals.lengths,
            *self.runtime.contexts,
        ]  # fmt: skip

    def _slips(self) -> Iterator[Slip]:
        """What no key says alone."""
        yield from self._benchmark_slips()
        yield from unknown("fidelity.benchmarks", self.fidelity.benchmarks, self.benchmarks)
        yield from unknown("fidelity.prompts_at", self.fidelity.prompts_at, self.fidelity.lengths)
        others = [one.name for one in methods.METHODS if not one.of_the_paper and one.name not in self.methods]
        yield from unknown("fidelity.methods", self.fidelity.methods, others)
        yield from self._comparison_slips()
        yield from self._length_slips()
        yield from unknown("methods", self.methods, methods.names())
        of_paper = [label for label in self.tables if self._table(label) not in ("fidelity", "answers", "residuals")]
        if of_paper and not set(self.methods) >= set(METHODS):
            problem = f"table {of_paper[0]} shows every method of the paper; have {', '.join(METHODS)}, or leave it out"
            yield Slip("methods", problem)
        yield from self._table_slips()
        yield from self._diagnostics_slips()
        yield from self._residual_slips()
        if self.phi.curriculum:
            yield from beyond("phi.curriculum.length", self.phi.curriculum.length, self.maps.trained)

    def _benchmark_slips(self) -> Iterator[Slip]:
        for benchmark in self.benchmarks:
            for length in self.lengths_of(benchmark):
                try:
                    tasks_of(benchmark, tokens_of(length))
                except ValueError as error:
                    yield Slip(f"benchmarks.{benchmark}", str(error))

    def _comparison_slips(self) -> Iterator[Slip]:
        """In what maps are compared on: names and points that the study does not have elsewhere."""
        mismatch, ablations = self.mismatch, self.ablations
        if mismatch.backbones:
            yield from unknown("mismatch.maps", mismatch.maps, self.maps.trained)
            yield from unknown("mismatch.lengths", mismatch.lengths, self.lengths_of("ruler"))
            yield from unknown("mismatch.budget", [mismatch.budget], self.budgets)
        if ablations.backbones:
            yield from unknown("ablations.benchmarks", ablations.benchmarks, self.benchmarks)
            yield from unknown("ablations.length", [ablations.length], self.maps.trained)
            yield from unknown("ablations.budget", [ablations.budget], self.budgets)
            for benchmark in ablations.benchmarks:
                yield from self._ablated_benchmark_slips(benchmark)
        if mismatch.backbones or ablations.backbones:
            needed = ("full", "topk", "topk_phi")
            for method in (method for method in needed if method not in self.methods):
                yield Slip("methods", f"{method} is missing, which mismatch and ablations compare with")

    def _ablated_benchmark_slips(self, benchmark: str) -> Iterator[Slip]:
        length = self.ablations.length
        yield from unknown("ablations.length", [length], self.lengths_of(benchmark))
        real = self.benchmarks[benchmark].budget_length == "real"
        if real and tokens_of(self.truncate_to) > tokens_of(length):
            yield Slip(
                "ablations.benchmarks",
                f"prompts of {benchmark} are up to truncate_to ({self.truncate_to}) long, beyond ablations.length "
                f"({length}), which the maps are trained on; take {benchmark} out",
            )

    def _length_slips(self) -> Iterator[Slip]:
        """The main maps serve every prompt and every captured text."""
        used = {f"length {length}": length for length in (*self.evaluated_lengths, *self.diagnostics.lengths)}
        for what, length in {**used, f"truncate_to: {self.truncate_to}": self.truncate_to}.items():
            if tokens_of(length) > tokens_of(self.maps.main):
                yield Slip("", f"{what} is beyond maps.main ({self.maps.main}), which the maps were trained on")

    def _table_slips(self) -> Iterator[Slip]:
        if "natural_main" in self.tables and len(self.lengths_of("longbench")) != 1:
            yield Slip("tables", "natural_main shows one length of longbench; give benchmarks.longbench.lengths one")
        needs = {"mismatch": "mismatch", "diagnostics": "diagnostics", "residuals": "residuals"}
        needs |= dict.fromkeys(("dphi", "loss"), "ablations")
        for label in self.tables:
            of = self._table(label)
            if of in needs and not getattr(self, needs[of]).backbones:
                yield Slip("tables", f"{label} needs a backbone in {needs[of]}.backbones")
            if of == "fidelity" and not (self.fidelity.lengths and self.fidelity.corpora):
                yield Slip("tables", f"{label} needs a length in fidelity.lengths and a text in fidelity.corpora")
            if of == "answers" and not any(map(self.answered_lengths, self.fidelity.benchmarks)):
                yield Slip("tables", f"{label} needs one of fidelity.benchmarks at one of fidelity.prompts_at")

    @staticmethod
    def _table(label: str) -> str:
        """What of a study a table shows; empty for an unknown one, which is refused with the known ones."""
        from residual_mass.paper.tables import RUNTIME, TABLES  # only here: tables are told what they show by specs

        found = TABLES.get(RUNTIME if label.startswith(RUNTIME) else label)
        return found.of if found else ""

    def _diagnostics_slips(self) -> Iterator[Slip]:
        """In what is captured, and in what the figures show of it."""
        captured, ablated = self.diagnostics, self.ablations.length
        yield from unknown("diagnostics.budget", [captured.budget], self.budgets)
        for corpus, length in product(captured.corpora, captured.lengths):
            if corpus in PROMPT_PACKS and length not in self.lengths_of("ruler"):
                yield Slip(
                    "diagnostics.corpora",
                    f"{corpus} is made of RULER's prompts, which the study does not have at {length}; take {corpus} "
                    "out, or evaluate ruler there",
                )
        if KERNEL_FIDELITY in self.figures and ablated not in captured.lengths:
            yield Slip(f"figures.{KERNEL_FIDELITY}", f"needs ablations.length ({ablated}) in diagnostics.lengths")
        options = {"corpus": captured.corpora, "corpora": captured.corpora, "maps": self.maps.trained}
        for label, figure in self.figures.items():
            if find(label).section == "fidelity":
                yield from self._fidelity_figure_slips(f"figures.{label}", figure)
            if find(label).section in ("fidelity", "residuals"):
                continue
            for key, values in (options | dict.fromkeys(("length", "lengths"), captured.lengths)).items():
                yield from unknown(f"figures.{label}.{key}", figure.of(key), values)

    def _residual_slips(self) -> Iterator[Slip]:
        """In which methods are compared head by head, and in what tables and figures show of them."""
        compared = self.residuals
        options = [one.name for one in methods.METHODS if not one.whole_prefix]
        yield from unknown("residuals.methods", compared.methods, options)
        for budget in self.budgets if "residual_estimators" in self.tables else ():
            if budget not in compared.budgets:
                yield Slip("residuals.budgets", f"{budget:g} is missing, which table residual_estimators shows; add it")
        forced = self.fidelity
        shared = {*compared.lengths} & {*forced.lengths}, {*compared.corpora} & {*forced.corpora}
        if "deployable" in self.tables and not all(shared):
            yield Slip("tables", "deployable needs a length and a text of residuals that fidelity has, too")
        for label in (label for label in RESIDUAL_FIGURES if label in self.figures):
            figure = self.figures[label]
            sections = [compared, forced] if label == FIDELITY_BY_BYTES else [compared]
            for section in sections:
                yield from unknown(f"figures.{label}.texts", figure.texts, section.corpora)
                yield from unknown(f"figures.{label}.lengths", figure.lengths, section.lengths)

    def _fidelity_figure_slips(self, where: str, figure: Figure) -> Iterator[Slip]:
        texts, lengths = figure.of("text", "texts"), figure.of("length", "lengths")
        text_key, length_key = (f"{where}.{key}{'s' * bool(figure.texts)}" for key in ("text", "length"))
        yield from unknown(text_key, texts, (*self.fidelity.corpora, *self.fidelity.benchmarks))
        yield from unknown(length_key, lengths, self.fidelity.lengths)
        for text, length in product(texts, lengths):
            if text in self.fidelity.benchmarks and length not in self.answered_lengths(text):
                yield Slip(length_key, f"prompts of {text} are not continued at {length}; take one of the two out")
