"""On a GPU: every row has the same measures as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import TINY
from tests.needs import GPU, needs
from tests.unit.diagnostics.test_capture import LENGTH, QUERIES, make_spec

from residual_mass.diagnostics.capture import captured
from residual_mass.diagnostics.packs import make_packs
from residual_mass.model.loading import load_backbone
from residual_mass.model.phi_maps import PhiMaps

pytestmark = [pytest.mark.gpu, needs(GPU)]


def test_rows_equal_those_of_the_cpu(folder: Path, phi: Path) -> None:
    spec, frames = make_spec(), []
    for device in ("cpu", "cuda"):
        backbone = load_backbone(TINY, folder, torch.device(device))
        packs = make_packs("wiki", backbone, str(LENGTH), QUERIES, 1, 0, folder, None)
        frames.append(captured(spec, backbone, PhiMaps.load(phi, device), packs)[0].reset_index(drop=True))
    ours, expected = frames[1], frames[0]
    for name in expected.columns:
        # A few rows may retrieve another token where two scores are equal up to rounding.
        apart = (ours[name].astype(float) - expected[name].astype(float)).abs() > 1e-3
        assert apart.mean() < 0.01, name
