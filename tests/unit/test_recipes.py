"""A change of code that can change a stage's numbers must bump the stage's recipe, or Snakemake will not rerun it.

A stage's code is what its command reaches (`definitions.py`), that of a selector or residual what its class does. The
digests ignore comments, docstrings and layout. After a bump, or after a change that provably alters no number:
`python -m tests.unit.test_recipes` writes them anew.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from tests.unit.definitions import PACKAGE, Package

from residual_mass import methods
from residual_mass.cli import STAGES
from residual_mass.methods import Method, Moments, TopK
from residual_mass.recipes import RECIPES

SOURCE = Path(__file__).parents[2] / "src"
RECORD = Path(__file__).with_name("recipe_digests.json")
NO_NUMBERS = [f"{PACKAGE}.{name}" for name in ("files", "machine", "methods", "provenance", "study")]
"""Modules that read and write files, ask for GPUs, keep records and say what a job is told, which its spec repeats: no
number of a result depends on them. Methods have recipes of their own.
"""


def stage_code(package: Package, stage: str) -> dict[tuple[str, str], list[ast.stmt]]:
    module, _, function = STAGES[stage.replace("_", "-")][0].partition(":")
    return package.reached(f"{PACKAGE}.{module}", function or "run", NO_NUMBERS)


def part_code(package: Package, part: type) -> dict[tuple[str, str], list[ast.stmt]]:
    """The code of a selector or a residual."""
    return package.reached(part.__module__, part.__name__, [])


def digest(statements: Iterable[ast.stmt]) -> str:
    text = "\n".join(ast.dump(_without_docstrings(statement)) for statement in statements)
    # Empty lists differ from one Python to the next: 3.12 adds those of type parameters, 3.13 leaves all out.
    same_everywhere = re.sub(r"(, )?\w+=\[\]", "", text)
    return hashlib.sha256(same_everywhere.encode()).hexdigest()[:16]


def _without_docstrings(tree: ast.stmt) -> ast.stmt:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return tree


def current(source: Path = SOURCE) -> dict[str, dict[str, int | str]]:
    package = Package(source)
    parts = {one for one in map(methods.__dict__.get, methods.__all__) if is_dataclass(one) and one is not Method}
    code = {stage: (RECIPES[stage], stage_code(package, stage)) for stage in RECIPES}
    for part in sorted(parts, key=lambda one: one.__name__):  # the paper's parts change with the stages
        code[part.__name__] = getattr(part, "recipe", RECIPES["generate"]), part_code(package, part)
    return {
        name: {"recipe": recipe, "digest": digest(s for place in sorted(reached) for s in reached[place])}
        for name, (recipe, reached) in code.items()
    }


def test_numeric_code_changes_only_with_its_recipe() -> None:
    recorded, present = json.loads(RECORD.read_text()), current()
    assert set(recorded) == set(present)
    for name, now in present.items():
        assert now == recorded[name], (
            f"code of {name} changed: bump its recipe (a stage's in RECIPES, a residual's in its class) if its numbers "
            "can change, then run python -m tests.unit.test_recipes"
        )


@pytest.mark.parametrize(
    ("stage", "module", "name"),
    [
        ("prompts", "benchmarks.ruler", "build_examples"),  # through a table of modules
        ("prompts", "benchmarks.stories", "tell"),
        ("generate", "model.hook", "greedy"),
        ("capture", "core.selection", "exhaustive_topk"),
        ("score", "holm", "holm"),
        ("train", "core.score_matching", "score_matching_losses"),
        ("train", "training.learner", "learning_rate"),
        ("capture", "core.measures", "row_measures"),
        ("runtime", "core.fused.triton_selection", "select_kernel"),
        ("findings", "diagnostics.claims", "CLAIMS"),
    ],
)
def test_a_stage_reaches_the_code_that_makes_its_numbers(stage: str, module: str, name: str) -> None:
    assert (f"{PACKAGE}.{module}", name) in stage_code(Package(SOURCE), stage)


def test_a_stage_does_not_reach_what_it_never_calls() -> None:
    reached = {module for module, _ in stage_code(Package(SOURCE), "score")}
    assert not any(module.startswith((f"{PACKAGE}.paper", f"{PACKAGE}.training")) for module in reached)


def test_a_method_has_a_digest_of_its_own_and_no_stage_has_it() -> None:
    package = Package(SOURCE)
    assert (f"{PACKAGE}.core.selection", "unordered_topk") in part_code(package, TopK)
    assert (f"{PACKAGE}.core.moments", "truncated_terms") in part_code(package, Moments)
    reached = {module for module, _ in stage_code(package, "generate")}
    assert f"{PACKAGE}.core.accounting" in reached and not any("methods" in module for module in reached)


def test_the_package_imports_none_of_its_modules_by_a_string() -> None:
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
                hidden = PACKAGE in ast.unparse(node) and file.name != "cli.py"  # whose table of stages is read
                assert not hidden, f"{file}:{node.lineno}: the digests do not see this import"


STAGE = f"from {PACKAGE} import tools\n\ndef run():\n    return tools.top()\n"
TOOLS = f"""from {PACKAGE}.deep import constant as renamed

def top():
    return renamed + helper()

def helper():
    return 1

def unused():
    return 2
"""


@pytest.mark.parametrize(
    ("file", "before", "after", "seen"),
    [
        ("tools.py", "return 1", "return 3", True),
        ("tools.py", "return 2", "return 3", False),
        ("tools.py", "return 1", "return (1)  # why", False),
        ("tools.py", "def helper():", "def helper():\n    '''Text.'''", False),
        ("deep.py", "constant = 4", "constant = 5", True),
        ("deep.py", "register()", "register(1)", True),
        ("benchmarks/prompts.py", "tools.top()", "tools.helper()", True),
    ],
)
def test_a_digest_sees_a_change_of_code_that_is_reached(
    file: str, before: str, after: str, seen: bool, tmp_path: Path
) -> None:
    folder = tmp_path / PACKAGE
    (folder / "benchmarks").mkdir(parents=True)
    deep = "'''Doc.'''\ndef register(*x):\n    pass\n\nregister()\nconstant = 4\n"
    for name, text in {"benchmarks/prompts.py": STAGE, "tools.py": TOOLS, "deep.py": deep, "__init__.py": ""}.items():
        (folder / name).write_text(text)

    def now() -> str:
        reached = stage_code(Package(tmp_path), "prompts")
        return digest(statement for place in sorted(reached) for statement in reached[place])

    old = now()
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after))
    assert (now() != old) == seen


if __name__ == "__main__":
    RECORD.write_text(json.dumps(current(), indent=1) + "\n")
