"""A change of code that can change a stage's numbers must bump the stage's recipe, or Snakemake will not rerun it.

The digests ignore comments, docstrings and layout. After a bump, or after a change that provably alters no number:
`python tests/unit/test_recipes.py` writes them anew.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from pathlib import Path

from residual_mass.recipes import RECIPES

SOURCE = Path(__file__).parents[2] / "src" / "residual_mass"
RECORD = Path(__file__).with_name("recipe_digests.json")
MODEL = [
    "backbones/hook.py",
    "backbones/loading.py",
    "backbones/phi_maps.py",
    "core/feature_maps.py",
    "core/support.py",
]
TEXTS = ["backbones/asset_texts.py", "backbones/corpora.py", "backbones/hub_stream.py"]
ACCOUNTING = ["core/accounting.py", "core/selection.py", "backbones/prefix.py"]
MEASURED = [*ACCOUNTING, "backbones/measured.py", "core/measures.py"]
NUMERIC = {
    "prompts": ["frozen_prompts.py", *(f"benchmarks/{n}.py" for n in
                ("babilong", "catalogue", "examples", "longbench", "prompts", "ruler", "stories"))],
    "train": [*MODEL, *TEXTS, "backbones/measured.py", "core/accounting.py", "core/measures.py",
              "core/objectives.py", "core/output_matching.py", "core/score_matching.py", "core/selection.py",
              *(f"training/{n}.py" for n in ("held_out", "initialise", "learner", "losses", "passes", "processes",
                                             "side_by_side", "teacher", "trainer"))],
    "generate": [*MODEL, *ACCOUNTING, "core/estimators.py", "backbones/decoder.py", "backbones/engine.py",
                 "benchmarks/generate.py", "benchmarks/scorers.py"],
    "score": ["benchmarks/catalogue.py", "benchmarks/scorers.py", "benchmarks/scoring.py", "benchmarks/statistics.py",
              "holm.py"],
    "capture": [*MODEL, *MEASURED, *TEXTS, "diagnostics/capture.py", "diagnostics/packs.py"],
    "kernels": [*MODEL, *ACCOUNTING, *TEXTS, "diagnostics/kernels.py", "diagnostics/packs.py"],
    "map_errors": [*MODEL, *MEASURED, *TEXTS, "diagnostics/map_errors.py", "diagnostics/packs.py"],
    "audit": ["backbones/phi_maps.py", "diagnostics/audit.py"],
    "runtime": [*MODEL, *ACCOUNTING, "backbones/prefill.py", "backbones/static_decode.py", "core/estimators.py",
                *(f"core/fused/{n}.py" for n in ("__init__", "cache", "torch_path", "triton_kernels", "triton_path")),
                *(f"runtime/{n}.py" for n in ("measure", "memory", "prototype", "traffic"))],
    "findings": [f"diagnostics/{n}.py" for n in ("claims", "claim_statistics", "findings", "resampling", "settings")],
}  # fmt: skip


def digest(files: list[str]) -> str:
    trees = [ast.dump(_without_docstrings(ast.parse((SOURCE / file).read_text()))) for file in files]
    # Empty lists differ from one Python to the next: 3.12 adds those of type parameters, 3.13 leaves all out.
    same_everywhere = re.sub(r"(, )?\w+=\[\]", "", "\n".join(trees))
    return hashlib.sha256(same_everywhere.encode()).hexdigest()[:16]


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return tree


def current() -> dict[str, dict[str, int | str]]:
    return {stage: {"recipe": RECIPES[stage], "digest": digest(files)} for stage, files in NUMERIC.items()}


def test_numeric_code_changes_only_with_its_recipe() -> None:
    recorded = json.loads(RECORD.read_text())
    assert set(recorded) == set(RECIPES) == set(NUMERIC)
    for stage, now in current().items():
        assert now == recorded[stage], (
            f"code of stage {stage} changed: bump RECIPES[{stage!r}] if its numbers can change, "
            "then run python tests/unit/test_recipes.py"
        )


def test_the_digest_sees_code_and_not_comments(tmp_path: Path) -> None:
    def of(text: str) -> str:
        (tmp_path / "m.py").write_text(text)
        return digest([str(tmp_path / "m.py")])

    code = "def f(x):\n    return x + 1\n"
    assert of(code) == of('"""Doc."""\n# why\ndef f(x):\n    """Adds."""\n    return (x + 1)\n')
    assert of(code) != of(code.replace("1", "2"))


if __name__ == "__main__":
    RECORD.write_text(json.dumps(current(), indent=1) + "\n")
