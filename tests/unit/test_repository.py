"""Statements of the repository about itself: environments, imports, continuous integration, licences."""

from __future__ import annotations

import ast
import graphlib
import importlib
import itertools
import json
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from tests import conftest, needs

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def locked_versions() -> dict[str, str]:
    """Name -> version; every package must have an exact pin that any index can serve, and hashes."""
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    packages = "\n".join(lines).replace(" \\\n", "").splitlines()
    pattern = r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)(?: +--hash=sha256:[0-9a-f]{64})+"
    pins = [re.fullmatch(pattern, package) for package in packages]
    assert None not in pins, f"not an exact pin: {packages[pins.index(None)][:100]!r}"
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def direct_requirements() -> dict[str, Requirement]:
    """What the extras ask for together: a package may be in several, and an extra may take in another one."""
    found: dict[str, Requirement] = {}
    for line in (*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())):
        one = found.setdefault(canonicalize_name(Requirement(line).name), Requirement(line))
        one.extras |= Requirement(line).extras
        one.specifier &= Requirement(line).specifier
    del found[canonicalize_name(PROJECT["name"])]
    return found


def imported(*nodes: ast.AST) -> set[str]:
    """Packages from elsewhere that code imports."""
    found: set[str] = set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"residual_mass"}


# ---- environments ----------------------------------------------------------------------------------------------------


def test_three_files_describe_one_environment() -> None:
    locked, direct = locked_versions(), direct_requirements()
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (python,) = (each for each in environment if str(each).startswith("python="))
    (from_pip,) = (each["pip"] for each in environment if isinstance(each, dict))
    pinned = {canonicalize_name(r.name): r for r in map(Requirement, from_pip)}
    assert direct.keys() <= locked.keys() and direct.keys() == pinned.keys()
    for name, asked in direct.items():
        assert locked[name] in asked.specifier, f"{name}: {locked[name]} is locked, {asked.specifier} asked for"
        assert (str(pinned[name].specifier), pinned[name].extras) == (f"=={locked[name]}", asked.extras), name
    assert python.removeprefix("python=") in SpecifierSet(PROJECT["requires-python"])


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_what_locked_packages_need_is_locked(python: str, system: str) -> None:
    """`make install` installs nothing else."""
    locked = locked_versions()
    there = {"extra": "", "python_version": python, "python_full_version": f"{python}.9"}
    there |= {"platform_system": system, "sys_platform": system.lower()}
    for package, version in locked.items():
        try:
            if metadata.version(package).partition("+")[0] != version:
                continue  # another environment than the locked one runs the tests
        except metadata.PackageNotFoundError:
            continue
        needed = [Requirement(line) for line in metadata.requires(package) or []]
        here = {canonicalize_name(r.name) for r in needed if r.marker is None or r.marker.evaluate(there)}
        unlocked = {name for name in here - locked.keys() if not re.match("nvidia|cuda|triton", name)}
        assert not unlocked, f"{package} needs {sorted(unlocked)}"


def test_what_the_package_imports_is_declared() -> None:
    distributions, declared = metadata.packages_distributions(), direct_requirements()
    for name in imported(*(ast.parse(file.read_text()) for file in SOURCES)) - {"triton"}:  # torch for CUDA brings it
        owners = {canonicalize_name(owner) for owner in distributions.get(name, [name])}
        assert owners & declared.keys(), f"{name} is imported, but pyproject.toml does not ask for it"


LIBRARY = """
import json, sys
from residual_mass import PhiMaps, partial_generate, partial_kv
print(json.dumps([module.__file__ for name, module in sys.modules.items() if name.startswith("residual_mass.")]))
"""


def test_the_library_imports_what_it_alone_depends_on() -> None:
    """`pip install residual-mass` brings what `partial_kv` needs; the pipeline is an extra."""
    run = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, check=True)
    declared = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    files = [Path(file) for file in json.loads(run.stdout)]
    assert any(file.name == "generate.py" for file in files)
    for file in files:
        top_level = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert imported(*top_level) <= declared, file


LIGHT = {
    "residual_mass.metrics": "torch numpy pandas pydantic", "residual_mass.files": "torch pandas pyarrow",
    "residual_mass.texts.assets": "torch",
    "residual_mass.machine.preflight": "torch", "residual_mass.paper.page": "torch",
    "residual_mass.paper.comparison": "torch", "residual_mass.diagnostics.findings": "torch",
}  # fmt: skip
"""Module -> packages that it must not take seconds to import; those that need less come first."""


def test_modules_import_nothing_heavy_that_they_need_not() -> None:
    lines = [
        f"import sys, {name}; assert not {set(heavy.split())} & {{*sys.modules}}, '{name}'"
        for name, heavy in LIGHT.items()
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_the_deviations_name_the_locked_versions() -> None:
    document = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
    names = {"PyTorch": "torch", "Transformers": "transformers", "lm-evaluation-harness": "lm-eval"}
    rows = dict(re.findall(rf"^\| ({'|'.join(names)}) \|.*\| (\S+) \|$", document, re.MULTILINE))
    assert rows == {title: locked_versions()[name] for title, name in names.items()}


def test_the_page_of_licences_is_what_its_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    table = page.partition("## Packages")[2].partition("| --- | --- |\n")[2]
    packages = [
        entry.split() for line in table.splitlines() for entry in line.split(" | ")[1].removesuffix(" |").split(", ")
    ]
    assert {canonicalize_name(name): version for name, version in packages} == locked_versions()
    assert "not stated" not in page
    monkeypatch.syspath_prepend(ROOT / "tools")
    try:
        assert importlib.import_module("licences").page() == page
    except ValueError:  # a package is not installed at its version
        needs.LOCKED.skip()


# ---- continuous integration ------------------------------------------------------------------------------------------

(WORKFLOW,) = (ROOT / ".github" / "workflows").glob("*.yml")
CONTENT = yaml.safe_load(WORKFLOW.read_text())
STEPS: list[dict[str, Any]] = [step for job in CONTENT["jobs"].values() for step in job["steps"]]


def test_a_workflow_may_read_pinned_actions_and_nothing_else() -> None:
    assert CONTENT["permissions"] == {"contents": "read"}
    assert not [name for name, job in CONTENT["jobs"].items() if "permissions" in job]
    text, used = WORKFLOW.read_text(), [step for step in STEPS if "uses" in step]
    assert "pull_request_target" not in text and "secrets" not in text
    assert text.count("uses:") == len(re.findall(r"uses: actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", text, re.M))
    assert all(step["with"]["persist-credentials"] is False for step in used if "/checkout@" in step["uses"])
    assert not [step["run"] for step in STEPS if "${{" in step.get("run", "")]  # no expression reaches a shell


def test_every_version_is_one_that_the_package_supports() -> None:
    matrix, supported = CONTENT["jobs"]["test"]["strategy"]["matrix"], direct_requirements()
    assert all(version in SpecifierSet(PROJECT["requires-python"]) for version in matrix["python"])
    locked, other = matrix["transformers"]
    assert locked == ""
    asked = {canonicalize_name(r.name): r.specifier for r in map(Requirement, other.split())}
    for name, wanted in (("transformers", "4.57.6"), ("datasets", "4.8.5"), ("huggingface-hub", "0.36.2")):
        assert wanted in asked[name] and wanted in supported[name].specifier


# ---- scripts and tests -----------------------------------------------------------------------------------------------


def missing(tree: ast.Module, module: types.ModuleType) -> Iterator[str]:
    """Yields `name.attribute` of the module's imported modules that these do not have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = getattr(module, node.value.id, None)
            if isinstance(owner, types.ModuleType) and not hasattr(owner, node.attr):
                yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_uses_exists(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run takes minutes to get to it."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(script.parent)])  # the scripts there find each other like this
    assert not list(missing(ast.parse(script.read_text()), importlib.import_module(script.stem)))


def test_no_test_is_skipped_for_a_reason_that_the_last_line_cannot_explain() -> None:
    assert conftest.pytest_terminal_summary is needs.pytest_terminal_summary
    for path in (ROOT / "tests").rglob("*.py"):
        if path not in (Path(needs.__file__), Path(__file__)):
            calls = re.findall(r"pytest\.(?:mark\.skip\w*|skip|importorskip)\b.*", path.read_text())
            assert all(".reason)" in call for call in calls), (path, calls)


# ---- the drawing of the house ----------------------------------------------------------------------------------------

PACKAGE = ROOT / "src" / "residual_mass"
FLOORS = (
    ("core", "kernels", "files", "metrics", "recipes", "statistics", "timing"),
    ("methods",),
    ("spec",),
    ("provenance",),
    ("texts",),
    ("model",),
    ("decode",),
    ("gpu",),
    ("benchmarks", "diagnostics", "estimate", "lm_eval", "machine", "paper", "runtime", "training", "verify"),
    ("crate",),
    ("measure",),
    ("serve",),
    ("study",),
    ("cli",),
    ("__main__",),
)
"""Folders and single files of the package, the lowest first; a new one gets its place here. A room imports from lower
floors alone.
"""
SEES_THE_GPU = "decode.backends"
"""The table of backends, the one file that looks upwards: at the optional backend, which uses the rest of `decode`."""


def modules() -> dict[str, Path]:
    """Every file of the package by its name below `residual_mass`, which is empty for the front door."""
    found = {}
    for path in SOURCES:
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix("__init__").removesuffix(".")] = path
    return found


def arrows() -> Iterator[tuple[str, str]]:
    """Yields every import of one file by another, also in functions and for type checkers.

    The front door is left out: it imports an entry point on first access, and it holds the version.
    """
    names = modules()
    for name in names.keys() - {""}:
        for node in ast.walk(ast.parse(names[name].read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                package, _, below = target.partition(".")
                found = below if below in names else below.rpartition(".")[0]
                if package == "residual_mass" and found not in ("", name):
                    yield name, found


def room_of(name: str) -> str:
    return name.partition(".")[0]


def test_every_room_has_a_floor() -> None:
    rooms = [room for floor in FLOORS for room in floor]
    assert sorted(rooms) == sorted({room_of(name) for name in modules()} - {""})


def test_imports_point_down() -> None:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    upwards = []
    for name, target in arrows():
        room, other = room_of(name), room_of(target)
        if (name, other) != (SEES_THE_GPU, "gpu") and room != other and floor_of[other] >= floor_of[room]:
            upwards.append(f"{name} imports {target}")
    assert not sorted(upwards)


def test_files_import_each_other_in_no_circle() -> None:
    edges: dict[str, set[str]] = {name: set() for name in modules()}
    for name, target in arrows():
        edges[name].add(target)
    graphlib.TopologicalSorter(edges).prepare()  # its error names a circle


SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr, ast.Raise, ast.Assert)
MOST_NODES = 25
"""Nodes of the syntax tree in a plain statement. Nine statements in ten have no more: calls with many arguments, errors
and tables of constants may.
"""


def plain_statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yields simple statements but docstrings, and but those of Triton's kernels, where a helper costs registers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in node.decorator_list):
            continue
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, SIMPLE) and not docstring:
            yield node
        yield from plain_statements(node)


def nodes_of_statements(path: Path) -> list[int]:
    """The number of nodes of every plain statement."""
    return [sum(1 for _ in ast.walk(statement)) for statement in plain_statements(ast.parse(path.read_text()))]


def folder_of(path: Path) -> str:
    """Returns the folder of the package that holds a file, which is empty for the files beside the folders."""
    return ".".join(path.relative_to(PACKAGE).parts[:-1][:1])


@pytest.mark.parametrize("folder", sorted({folder_of(path) for path in SOURCES}))
def test_statements_are_plain(folder: str) -> None:
    sizes = []
    for path in SOURCES:
        if folder_of(path) == folder:
            sizes += nodes_of_statements(path)
    sizes.sort()
    assert sizes[len(sizes) * 9 // 10] <= MOST_NODES, f"{folder}: unpack the densest statements of the change"


def constants_of(path: Path) -> Iterator[str]:
    """Yields the names of a module's constants."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and target.id.isupper():
                yield target.id


def test_a_constant_has_a_name_of_its_own() -> None:
    """Whoever searches for it finds one place where it is set."""
    homes: dict[str, list[str]] = {}
    for name, path in modules().items():
        for constant in constants_of(path):
            homes.setdefault(constant, []).append(name)
    assert not {constant: names for constant, names in homes.items() if len(names) > 1}


def test_only_the_table_of_backends_and_the_trainer_look_at_the_gpu() -> None:
    users = set()
    for path in (ROOT / "src" / "residual_mass").rglob("*.py"):
        if re.search(r"residual_mass\.gpu\b", path.read_text()) and path.parent.name != "gpu":
            users.add(path.relative_to(ROOT / "src" / "residual_mass").as_posix())
    assert users == {"decode/backends.py", "training/learner.py"}
