"""Backbones: where they come from and how they are run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from residual_mass.core.settings import Settings
from residual_mass.study.parsing import Slip
from residual_mass.study.sections.fields import Field
from residual_mass.study.sections.values import Count, Line, Name, ShortName


@dataclass(frozen=True)
class BackboneSettings(Settings):
    """A frozen language model: where it comes from and how it is run."""

    study: Line
    """The one study whose protocol applies to this backbone."""
    model_id: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?$", title="hub repository")
    ]
    """Repository on the Hugging Face hub; with `source: assets` its last part, in lower case, names the folder under
    `models/`."""
    revision: Name
    """Commit on the hub, 40 digits and letters a to f, or a label for the weights of the assets."""
    source: Literal["assets", "hub", "random"]
    """Where the weights come from; `random` takes the shape from the assets and draws the weights."""
    dtype: Literal["float32", "bfloat16"]
    """Precision of weights and activations."""
    tokenizer: ShortName
    """Label of the tokenizer; backbones of a study that share it share the frozen prompts."""
    context: Count
    """Longest sequence that the backbone was made for, in tokens."""
    requires_gpu: bool = False
    """Whether jobs of this backbone ask for a GPU."""


@dataclass(frozen=True, kw_only=True)
class RegisteredBackbone(BackboneSettings):
    """A backbone as `config.yaml` registers it."""

    title: Line
    """Name in tables and figures."""

    def __post_init__(self) -> None:
        if self.dtype == "bfloat16" and not self.requires_gpu:
            raise Slip("requires_gpu", "a backbone in bfloat16 is run on a GPU; write `requires_gpu: true`")
