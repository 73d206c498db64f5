"""The Python of docs/moments.md runs as it stands, on a tiny model in place of the mini study's."""

from __future__ import annotations

import re
from pathlib import Path

from residual_mass.backbones.loading import Backbone

PAGE = Path(__file__).parents[2] / "docs" / "moments.md"


def test_the_examples_of_moments(tiny_backbone: Backbone, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    tiny_backbone.model.save_pretrained(tmp_path)
    tiny_backbone.tokenizer.save_pretrained(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(re.sub(r'^folder = ".*"$', f"folder = {str(tmp_path)!r}", block, flags=re.MULTILINE), names)
        prompt = names["inputs"]["input_ids"].shape[1]
        assert 0 < names["output"].shape[1] - prompt <= 8
    assert len(blocks) == 2
