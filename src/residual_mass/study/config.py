"""`config.yaml` and all studies, each checked in itself and against the others."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import yaml
from pydantic import AfterValidator, BaseModel, Field, create_model

from residual_mass.core.settings import Settings, tokens_of
from residual_mass.study.checks import unknown
from residual_mass.study.labels import (
    KERNEL_FIDELITY,
    PUBLISHED,
    RESIDUAL_FIGURES,
)
from residual_mass.study.parsing import Parsed, Slip, parsed
from residual_mass.study.protocol import Study
from residual_mass.study.sections.backbones import RegisteredBackbone
from residual_mass.study.sections.training import SECTIONS_OF_PHI, Phi
from residual_mass.study.sections.values import Count, Label, Line, Name, OneOrMore, ShortName


@cache
def changes_of(settings: type[Any], *names: str) -> type[BaseModel]:
    """A model with the keys of `settings`, or with `names` of them; each may be left out, also within sections."""
    hints = get_type_hints(settings, include_extras=True)
    fields: dict[str, Any] = {
        name: (changes_of(hints[name]) if name in SECTIONS_OF_PHI else hints[name], None)
        for name in names or [field.name for field in dataclasses.fields(settings)]
    }
    name = f"Changes of {'Phi in a variant' if names else settings.__name__}"
    return create_model(name, __config__=Settings.__pydantic_config__, **fields)


def _told(changes: BaseModel) -> dict[str, Any]:
    """What the file says, without the keys that it leaves out."""
    return changes.model_dump(mode="json", exclude_unset=True)


VariantChanges = Annotated[changes_of(Phi, "map", "objective"), AfterValidator(_told)]


@dataclass(frozen=True)
class AblationRows(Settings):
    """Rows of the ablation tables, in order; `ours` is the study's own recipe."""

    dphi: OneOrMore[Name]
    """Rows of `results/ablation_dphi_*.csv`."""
    loss: OneOrMore[Name]
    """Rows of `results/ablation_loss_*.csv`."""


@dataclass(frozen=True, kw_only=True)
class Main(Settings):
    """What `config/config.yaml` says."""

    study: Line
    """Study that `all` makes: a file of `config/studies` without its ending."""
    examples: Count | None
    """Examples per task, in place of every benchmark's own count; `null` keeps the study's. Existing rows are kept."""
    assets: Annotated[str, Field(pattern=r"^[^{}\x00-\x1f\x7f-][^{}\x00-\x1f\x7f]*$", title="folder")]
    """Folder of the downloaded data and models; one that was made elsewhere is used as it is."""
    offline: bool
    """Whether to run without network, from the assets folder and the hub's cache, which the target `prefetch` fills."""
    backbones: Annotated[dict[ShortName, RegisteredBackbone], Field(min_length=1)]
    """Language models by the short name that file names carry."""
    variants: dict[Label, VariantChanges]
    """Feature maps that the ablations train beside the study's own, by label: what each changes of `phi.map` and
    `phi.objective`."""
    ablations: AblationRows

    def __post_init__(self) -> None:
        if "ours" in self.variants:
            raise Slip("variants.ours", "the name of a study's own recipe; rename the variant")
        for name in ("dphi", "loss"):
            for row in getattr(self.ablations, name):
                if row not in ("ours", *self.variants):
                    raise Slip(f"ablations.{name}", f"{row} is not ours and not one of {', '.join(self.variants)}")


@dataclass(frozen=True)
class Configuration:
    """`config.yaml` and all studies, checked against each other."""

    main: Main
    studies: dict[str, Study]

    def __post_init__(self) -> None:
        if (problem := next(self._problems(), None)) is not None:
            raise ValueError(problem)

    def backbones_of(self, study: str) -> list[str]:
        return [name for name, backbone in self.main.backbones.items() if backbone.study == study]

    def tokenizer_owner(self, tokenizer: str) -> str:
        """The first backbone with the tokenizer; the prompts that all of them share are built with its settings."""
        return next(name for name, backbone in self.main.backbones.items() if backbone.tokenizer == tokenizer)

    def _problems(self) -> Iterator[str]:
        """What no file says alone, one line each."""
        for name in self.main.backbones:
            yield from (f"config/config.yaml: backbones.{name}.{slip}" for slip in self._backbone_slips(name))
        for name in self.studies:
            if not re.fullmatch("[A-Za-z0-9_][A-Za-z0-9_-]*", name):
                yield f"config/studies: '{name}.yaml': a study's name has letters, digits, _ and - only; rename it"
            if name == PUBLISHED:
                yield f"{file_of(name)}: that name is for the tables with the paper's own values; rename the study"
        if self.main.study not in self.studies:
            yield f"study {self.main.study!r} is not known; known are {', '.join(self.studies)} (config/studies)"
        elif not self.backbones_of(self.main.study):
            yield (
                f"study {self.main.study} has no backbone; give one `study: {self.main.study}` in config/config.yaml"
            )
        for name in self.studies:
            yield from (f"{file_of(name)}: {slip}" for slip in self._study_slips(name))

    def _backbone_slips(self, name: str) -> Iterator[Slip]:
        backbone = self.main.backbones[name]
        if backbone.study not in self.studies:
            yield Slip("study", f"{backbone.study!r} is not a study; known are {', '.join(self.studies)}")
            return
        for length in self.studies[backbone.study].all_lengths:
            if tokens_of(length) > backbone.context:
                problem = f"{backbone.context} tokens, but study {backbone.study} has the length {length}"
                yield Slip("context", problem)
        owner = self.main.backbones[self.tokenizer_owner(backbone.tokenizer)]
        if owner.study != backbone.study:
            problem = f"{backbone.tokenizer} is of study {owner.study}; backbones share one within a study"
            yield Slip("tokenizer", problem)
        if backbone.source == "hub" and not re.fullmatch("[0-9a-f]{40}", backbone.revision):
            problem = f"{backbone.revision} may move; write the commit, 40 digits and letters a to f"
            yield Slip("revision", problem)

    def _study_slips(self, name: str) -> Iterator[Slip]:
        """In what a study says of backbones and variants."""
        study, backbones = self.studies[name], self.backbones_of(name)
        yield from unknown("mismatch.backbones", study.mismatch.backbones, backbones)
        yield from unknown("ablations.backbones", study.ablations.backbones, backbones)
        yield from unknown("diagnostics.backbones", study.diagnostics.backbones, backbones)
        yield from unknown("residuals.backbones", study.residuals.backbones, backbones)
        yield from unknown("tables", study.tables, tables_for(backbones))
        whose = {KERNEL_FIDELITY: study.ablations.backbones}
        whose |= dict.fromkeys(RESIDUAL_FIGURES, study.residuals.backbones)
        for label, figure in study.figures.items():
            options = {"variants": list(self.main.variants)}
            options |= dict.fromkeys(("backbone", "backbones"), whose.get(label, backbones))
            for key, values in options.items():
                yield from unknown(f"figures.{label}.{key}", figure.of(key), values)


def tables_for(backbones: Iterable[str]) -> list[str]:
    """Labels of the tables that a study of these backbones may show."""
    from residual_mass.paper.tables import RUNTIME, TABLES  # only here, for tables are told what they show by specs

    return [*(label for label in TABLES if label != RUNTIME), *(f"{RUNTIME}{backbone}" for backbone in backbones)]


def file_of(study: str) -> str:
    """The file of a study, as messages name it."""
    return f"config/studies/{study}.yaml"


# ---- reading ---------------------------------------------------------------------------------------------------------


def load(root: Path, main: Mapping[str, Any]) -> Configuration:
    """The configuration of a checkout.

    Args:
        main: config/config.yaml with what the command line changed.

    Raises:
        ValueError: a file is not YAML, or a key is unknown, missing or wrong, or contradicts another; one line that
            names file, key and remedy.
    """
    files = sorted((root / "config/studies").glob("*.yaml"))
    checked = _from_file("configuration", Main, dict(main))
    return Configuration(checked, {path.stem: _from_file(file_of(path.stem), Study, _yaml(path)) for path in files})


def _from_file(where: str, settings: type[Parsed], data: Any) -> Parsed:
    try:
        return parsed(settings, data)
    except Slip as slip:
        raise ValueError(f"{where}: {slip}") from None


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file_of(path.stem)}: not valid YAML: {' '.join(str(error).split())}") from None
