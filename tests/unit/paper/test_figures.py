"""The gain figure shows the points that a slow reading of the rows gives, in reproducible bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sample_results import diagnostics

from residual_mass.paper.figures import draw_entropy_gain, entropy_gain_points, run


def slow_points(frame: pd.DataFrame, k: int) -> list[tuple[float, float]]:
    """(mean entropy, mean gain) of every layer and head at `k`, one row at a time."""
    seen: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for _, row in frame.iterrows():
        if row["k"] == k:
            seen.setdefault((row["layer"], row["head"]), []).append((row["h_mid"], row["e_topk"] - row["e_sub"]))
    means = [np.mean(values, axis=0) for values in seen.values()]
    return sorted((float(entropy), float(gain)) for entropy, gain in means)


def test_points_are_means_over_packs_and_queries() -> None:
    frame = diagnostics()
    points = entropy_gain_points(frame)
    assert len(points) == 2 * 2 * 3
    for k in (1, 21):
        of_k = points[points["k"] == k]
        np.testing.assert_allclose(
            sorted(zip(of_k["h_mid"], of_k["gain"], strict=True)), slow_points(frame, k), rtol=1e-12
        )


def test_the_panels_show_every_point_and_its_sign() -> None:
    frame = diagnostics()
    figure = draw_entropy_gain(entropy_gain_points(frame), "a title")
    for axis, k in zip(figure.axes, (1, 21), strict=True):
        helped, hurt = (np.asarray(collection.get_offsets()) for collection in axis.collections)
        assert (helped[:, 1] > 0).all() and (hurt[:, 1] <= 0).all()
        shown = sorted(map(tuple, np.concatenate([helped, hurt]).tolist()))
        np.testing.assert_allclose(shown, slow_points(frame, k), rtol=1e-12)
        assert axis.get_title().startswith(f"$K = {k}$ (")
        assert axis.get_title().endswith(f"{len(helped) / 6:.1%} of 6 heads gain")


def draw(tmp_path: Path, data: Path, name: str) -> tuple[bytes, bytes]:
    pdf, png = tmp_path / f"{name}.pdf", tmp_path / f"{name}.png"
    code = (
        "import sys, pathlib; from residual_mass.paper.figures import run; d, f, g = map(pathlib.Path, sys.argv[1:]); "
    )
    code += "run('entropy_gain', 'Costs $5 & more_', [d], f, g)"
    subprocess.run([sys.executable, "-c", code, data, pdf, png], check=True)
    return pdf.read_bytes(), png.read_bytes()


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    diagnostics().to_parquet(data := tmp_path / "heads.parquet")
    (pdf, png), again = (draw(tmp_path, data, name) for name in ("first", "second"))
    assert (pdf, png) == again
    assert pdf.startswith(b"%PDF") and b"CreationDate" not in pdf
    assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20]) == 1100  # 5.5 in at 200 dpi


def spoil(column: str, value: float) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda frame: frame.assign(**{column: [value, *frame[column][1:]]})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (spoil("e_sub", float("nan")), "e_sub holds values that are not finite"),
        (spoil("h_mid", float("inf")), "h_mid holds values that are not finite"),
        (lambda frame: frame.drop(columns="e_topk"), "column e_topk is missing"),
        (lambda frame: frame.iloc[:0], "has no rows"),
    ],
)
def test_bad_diagnostics_are_refused(
    tmp_path: Path, edit: Callable[[pd.DataFrame], pd.DataFrame], message: str
) -> None:
    edit(diagnostics()).to_parquet(data := tmp_path / "heads.parquet")
    with pytest.raises(ValueError, match=f"^{data}: {message}"):
        run("entropy_gain", "", [data], tmp_path / "f.pdf", tmp_path / "f.png")
    assert not list(tmp_path.glob("*.p[dn][fg]"))


def test_a_cut_or_missing_file_is_refused(tmp_path: Path) -> None:
    diagnostics().to_parquet(data := tmp_path / "heads.parquet")
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"heads\.parquet: not a Parquet file"):
        run("entropy_gain", "", [data], tmp_path / "f.pdf", tmp_path / "f.png")
    with pytest.raises(ValueError, match=r"gone\.parquet: no such file"):
        run("entropy_gain", "", [tmp_path / "gone.parquet"], tmp_path / "f.pdf", tmp_path / "f.png")


def test_an_unknown_figure_and_two_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="figure 'nothing' is unknown; known is entropy_gain"):
        run("nothing", "", [tmp_path], tmp_path / "f.pdf", tmp_path / "f.png")
    with pytest.raises(ValueError, match="shows one diagnostics file, 2 were given"):
        run("entropy_gain", "", [tmp_path, tmp_path], tmp_path / "f.pdf", tmp_path / "f.png")
