"""The feature maps of a whole backbone, and their safetensors file.

The file holds tensors `query.{layer}.{name}` and `key.{layer}.{name}`, stacked over heads, and a JSON header with the
maps' shapes and training.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from residual_mass.core.feature_maps import FoldedMap, HedgehogMap, ReZeroMap
from residual_mass.files import atomic_write, sha256_of
from residual_mass.methods.interface import Step
from residual_mass.model.layers import device_of
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import MAPS_HEADER, MapSpec, MapsSpec

MAPS_AT_FAULT = "the feature maps are damaged, or diverged in training: delete their file and train again"


@dataclass(frozen=True)
class HeadShape:
    """Numbers of layers and heads, and head dimension; maps and backbone must agree on them."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> HeadShape:
        """Reads the shape from a transformers model configuration; of one with images or sound, that of the text.

        Raises:
            ValueError: layers have numbers or widths of heads of their own.
        """
        config = config.get_text_config(decoder=True)
        try:
            return cls._common(config)
        except (AttributeError, RuntimeError) as error:  # transformers' own for what varies between layers
            reason, *_ = str(error).split(". ")
            raise ValueError(
                f"{type(config).__name__} has no shape of heads for all layers ({reason}), which only partial_kv does "
                "without"
            ) from None

    @classmethod
    def _common(cls, config: Any) -> HeadShape:
        query_heads = config.num_attention_heads
        without_positions = getattr(config, "qk_nope_head_dim", None)
        if without_positions is not None:  # latent attention: a key for every head
            head_dim = without_positions + config.qk_rope_head_dim
            return cls(config.num_hidden_layers, query_heads, query_heads, head_dim)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
        return cls(config.num_hidden_layers, query_heads, kv_heads, head_dim)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query_heads // self.kv_heads

    def step(self, tokens: int, *, anchors: int = 0, retrieved: float = 0, features: int = 0) -> Step:
        """Returns the sizes of a step in one layer and KV head, after a prompt of so many tokens."""
        return Step(tokens, self.head_dim, self.group, anchors, retrieved, features)


class PhiMaps(nn.Module):
    """phi_q per query head and phi_k per KV head, for every layer.

    Attributes:
        query, key: one stacked map per layer, with H = query heads and H = KV heads.
        shape, map: head shape and map shape.
        training_facts: backbone model_id and revision, length in tokens, recipe; empty before training.
        sha256: hash of the file that the maps were loaded from, or None.
    """

    def __init__(self, shape: HeadShape, map_spec: MapSpec, training: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.map = map_spec
        self.training_facts = training or {}
        self.sha256: str | None = None
        self.query = _make_layers(map_spec, shape, shape.query_heads)
        self.key = _make_layers(map_spec, shape, shape.kv_heads)

    def on(self, model: PreTrainedModel) -> PhiMaps:
        """Returns these maps if they are on the model's device and have its precision or a higher one, otherwise a copy
        that does (`to` would change the caller's maps).
        """
        own = next(self.parameters())
        device = device_of(model)
        dtype = torch.promote_types(own.dtype, model.dtype)
        if own.device == device and own.dtype == dtype:
            return self
        return copy.deepcopy(self).to(device, dtype)

    @torch.no_grad()
    def folded(self) -> list[tuple[FoldedMap | nn.Module, FoldedMap | nn.Module]]:
        """Returns (phi_q, phi_k) of every layer with consecutive linear layers multiplied out, for decoding."""
        layers = []
        # Autocast would multiply the weights out in half precision.
        with torch.autocast(next(self.parameters()).device.type, enabled=False):
            for query, key in zip(self.query, self.key, strict=True):
                layers.append((query.fold(), key.fold()))
        return layers

    def require(self, shape: HeadShape, model_id: str | None = None, revision: str | None = None) -> None:
        """Raises ValueError unless these maps fit a backbone's shape and, if given, its model id and revision."""
        if shape != self.shape:
            raise ValueError(
                f"phi maps are for heads {asdict(self.shape)}, the backbone has {asdict(shape)}; "
                "give maps that were trained on it"
            )
        own_id = self.training_facts.get("model_id")
        own_revision = self.training_facts.get("revision")
        if model_id is not None and (own_id, own_revision) != (model_id, revision):
            raise ValueError(
                f"phi maps were trained on {own_id} ({own_revision}), not {model_id} ({revision}); "
                "give maps that were trained on it"
            )

    def save(self, path: Path) -> None:
        """Writes maps and header to a safetensors file, whole or not at all; raises OSError if it cannot be written."""
        facts = {"shape": asdict(self.shape), "map": asdict(self.map), "training": self.training_facts}
        header = {MAPS_HEADER: json.dumps(facts, sort_keys=True)}
        write_safetensors(path, self.state_dict(), header)

    @classmethod
    @torch.inference_mode(False)  # so that maps that are loaded in inference mode can be used outside of it
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> PhiMaps:
        """Loads maps without gradients; raises ValueError if the file is missing, damaged or holds something else."""
        path = Path(path)
        header, tensors = read_safetensors(path)
        if MAPS_HEADER not in header:
            raise ValueError(f"{path}: holds no phi maps (no {MAPS_HEADER} in its header); train them with `train`")
        remedy = "delete the file and train again"
        try:
            facts = json.loads(header[MAPS_HEADER])
            shape = HeadShape(**facts["shape"])
            map_spec = MapSpec(**facts["map"])
            training = dict(facts["training"])
            if shape.layers > len(tensors):  # a damaged number would build millions of them
                raise ValueError(f"{shape.layers} layers, but {len(tensors)} tensors")
            with torch.device("meta"):
                maps = cls(shape, map_spec, training)
            expected = _forms(maps.state_dict())
        except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: its header is damaged ({error}); {remedy}") from None
        if expected != _forms(tensors):
            raise ValueError(f"{path}: tensors do not fit the head shape in the header; {remedy}")
        if not_finite := [name for name, t in tensors.items() if not t.isfinite().all()]:
            raise ValueError(f"{path}: {not_finite[0]} holds values that are not finite; {remedy}")
        # Parameters on the meta device have no memory to copy into.
        maps.load_state_dict(tensors, assign=True)
        maps.sha256 = sha256_of(path)
        return maps.to(device).requires_grad_(False)


def files_by_label(phi: Sequence[Path], maps: Sequence[MapsSpec], arms: Iterable[ArmSpec] = ()) -> dict[str, Path]:
    """Returns the files of a spec's maps by label.

    Raises:
        ValueError: the numbers of files and maps differ, or an arm needs maps that are not among them.
    """
    if len(phi) != len(maps):
        raise ValueError(f"--phi has {len(phi)} files, but spec.maps names {len(maps)} maps; give one for each")
    labels = [spec.label for spec in maps]
    files = dict(zip(labels, phi, strict=True))
    for arm in arms:
        if arm.needs_maps and arm.maps not in files:
            raise ValueError(f"arm {arm.method}: maps {arm.maps!r} is not in spec.maps, which has {', '.join(files)}")
    return files


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file; raises ValueError with its name if it is missing or damaged."""
    try:
        with safetensors.safe_open(path, framework="pt") as stream:
            yield stream
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; make it first") from None
    except (safetensors.SafetensorError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: damaged safetensors file ({error}); delete it and make it again") from None


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Writes the file atomically; raises OSError with its name on failure, such as a full disk."""
    with atomic_write(path) as temporary:
        try:
            plain = {}
            for name, tensor in tensors.items():
                plain[name] = tensor.detach().cpu().contiguous()
            save_file(plain, temporary, metadata)
        except safetensors.SafetensorError as error:
            raise OSError(str(error)) from None


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Reads header metadata and all tensors; errors as for `open_safetensors`."""
    with open_safetensors(path) as stream:
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        return stream.metadata() or {}, tensors


def _forms(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    forms = {}
    for name, tensor in tensors.items():
        forms[name] = tensor.shape, tensor.dtype
    return forms


def _make_layers(spec: MapSpec, shape: HeadShape, heads: int) -> nn.ModuleList:
    """Builds one map for each layer, stacked over `heads` query or KV heads."""
    maps = [_make(spec, heads, shape.head_dim) for _ in range(shape.layers)]
    return nn.ModuleList(maps)


def _make(spec: MapSpec, heads: int, head_dim: int) -> nn.Module:
    if spec.kind == "hedgehog":
        return HedgehogMap(heads, head_dim, spec.d_phi)
    if spec.kind != "rezero":
        raise ValueError(f"feature maps of kind {spec.kind!r} are not known")
    return ReZeroMap(heads, head_dim, spec.d_emb, spec.d_phi)
