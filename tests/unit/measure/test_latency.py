"""`residual-mass measure --latency`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from tests.conftest import byte_tokenizer, tiny_llama
from tests.needs import COMPILED, KERNELS, needs
from tests.unit.measure.test_measuring import parsed

from residual_mass import cli
from residual_mass.kernels.cpu import has_bfloat16
from residual_mass.measure.latency import latency_text


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A model whose heads the kernels serve."""
    tiny_llama(width=64).save_pretrained(tmp_path / "wide")
    byte_tokenizer().save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


@needs(KERNELS)
def test_every_side_is_timed_at_every_length(wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sides of the kernels first, and no budgets of a cache that is read whole."""
    options = "--methods cache8 topk scan4_regression_64 --budgets 5 10 --latency 512 256"
    cli.main(["measure", str(wide), *options.split(), "--out", str(tmp_path / "out")])
    rows = pd.read_csv(tmp_path / "out" / "wide-latency.csv")
    scan, topk = (f"{name}, {{}} %".format for name in ("scan4_regression_64", "topk"))
    sides = ["transformers", "full", "cache8", scan(5), scan(10), topk(5), topk(10)]
    assert rows["side"].tolist() == [side for length in (256, 512) for side in sides]
    assert rows["tokens"].tolist() == [256] * len(sides) + [512] * len(sides)
    assert (rows["fastest"] > 0).all() and (rows["fastest"] <= rows["seconds"]).all()
    kept = rows[rows["tokens"] == 512].set_index("side")["kept_mib"]
    assert kept["cache8"] < kept["full"] < kept["transformers"] <= kept[topk(5)]
    said = capsys.readouterr().out
    assert said.count(" is faster than ") == 4 * 3 and (tmp_path / "out" / "wide-latency.txt").read_text() in said


@needs(KERNELS)
def test_packed_weights_are_those_of_all_sides(wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their files are others than those of the model as it is; the cache of full attention is in bfloat16 with them."""
    kept = {}
    for flags, name in (("", "wide-latency"), ("--weights 8", "wide-latency-weights8")):
        options = f"--methods cache8 --latency 256 {flags} --out {tmp_path / 'out'}"
        cli.main(["measure", str(wide), *options.split()])
        rows = pd.read_csv(tmp_path / "out" / f"{name}.csv").set_index("side")
        kept[name] = rows["kept_mib"]["transformers"]
        said = capsys.readouterr().out
        assert said.startswith(f"wide{', weights of 8 bits' * bool(flags)}, 1 thread: milliseconds")
        assert list(rows.index) == ["transformers", "full", "cache8"]
    shares = kept["wide-latency-weights8"] / kept["wide-latency"]
    assert shares == (0.5 if has_bfloat16() else 1.0)


@needs(KERNELS)
@needs(COMPILED)
@pytest.mark.slow
def test_compiled_steps_are_those_of_methods_alone(
    wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = f"--methods cache8 topk --budgets 10 --latency 256 --compile --out {tmp_path / 'out'}"
    cli.main(["measure", str(wide), *options.split()])
    assert capsys.readouterr().out.startswith("wide, steps compiled but transformers', 1 thread: milliseconds")
    assert [record.message.startswith("compiled the decode step") for record in caplog.records].count(True) == 1
    assert (tmp_path / "out" / "wide-latency-compiled.csv").exists()


def test_a_method_is_faster_from_where_it_stays_so() -> None:
    """A length at which it is faster by chance, below one at which it is not, does not count."""
    fastest = {"transformers": (1, 4, 9), "cache8": (2, 2, 2), "scan4, 2 %": (3, 3, 3), "topk, 2 %": (0.5, 5, 5)}
    frame = pd.DataFrame(fastest, index=pd.Index([1024, 4096, 16384], name="tokens")).unstack().rename("fastest")
    frame = frame.rename_axis(index=["side", "tokens"]).reset_index().assign(seconds=9.0, kept_mib=1.0)
    lines = latency_text(parsed("--latency"), frame).splitlines()
    assert [line for line in lines if "faster" in line] == [
        "scan4, 2 % is faster than transformers from 4,096 tokens on.",
        "scan4, 2 % is faster than cache8 at none of these lengths.",
        "topk, 2 % is faster than transformers from 16,384 tokens on.",
        "topk, 2 % is faster than cache8 at none of these lengths.",
    ]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--latency letter.txt", "--latency: length 'letter.txt' is not a length label: write 512, 1k"),
        ("--latency 512 --methods topk_phi", "--latency times methods without feature maps; leave topk_phi out"),
        ("--latency 512 --methods tokp", "method 'tokp' is unknown; the most similar are topk"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    options: str, line: str, wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["measure", str(wide), *options.split(), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2 and f"residual-mass measure: error: {line}" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*"))
