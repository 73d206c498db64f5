"""pyproject.toml, requirements.lock and environment.yml describe one environment."""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "requirements.lock", "environment.yml")


def locked_versions(root: Path) -> dict[str, str]:
    """Name -> version; every line must be an exact pin that any index can serve."""
    lines = [line for line in (root / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    pins = [re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)", line) for line in lines]
    assert None not in pins, f"not an exact pin: {lines[pins.index(None)]!r}"
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def direct_requirements(root: Path) -> dict[str, Requirement]:
    """What the extras ask for together: a package may be in several."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    own = canonicalize_name(project["name"])  # an extra may take in another one
    found: dict[str, Requirement] = {}
    for asked in map(Requirement, lines):
        one = found.setdefault(canonicalize_name(asked.name), asked)
        one.extras |= asked.extras
        one.specifier &= asked.specifier
    found.pop(own, None)
    return found


def disagreements(root: Path) -> list[str]:
    """Where the three files say different things."""
    locked, direct = locked_versions(root), direct_requirements(root)
    environment = yaml.safe_load((root / "environment.yml").read_text())
    (python,) = (d for d in environment["dependencies"] if str(d).startswith("python="))
    (from_pip,) = (d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    pinned = {canonicalize_name(r.name): r for r in map(Requirement, from_pip)}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]

    found = [f"{name}: not in requirements.lock" for name in direct.keys() - locked.keys()]
    for name in direct.keys() & locked.keys():
        if locked[name] not in direct[name].specifier:
            found.append(f"{name}: {locked[name]} in requirements.lock, {direct[name].specifier} in pyproject.toml")
    found += [f"{name}: in only one of pyproject.toml and environment.yml" for name in direct.keys() ^ pinned.keys()]
    for name in direct.keys() & pinned.keys():
        if str(pinned[name].specifier) != f"=={locked.get(name)}":
            found.append(
                f"{name}: {pinned[name].specifier} in environment.yml, {locked.get(name)} in requirements.lock"
            )
        if pinned[name].extras != direct[name].extras:
            found.append(f"{name}: other extras in environment.yml")
    if python.removeprefix("python=") not in SpecifierSet(project["requires-python"]):
        found.append(f"{python} is outside {project['requires-python']}")
    return found


def test_the_three_files_agree() -> None:
    assert disagreements(ROOT) == []


DRIFTS = [
    ("requirements.lock", r"^(tqdm==).*$", r"\g<1>4.0.0", "tqdm: 4.0.0 in requirements.lock, >="),
    ("requirements.lock", r"^jinja2==.*\n", "", "jinja2: not in requirements.lock"),
    ("environment.yml", r"(- pandas==).*", r"\g<1>2.2.0", "pandas: ==2.2.0 in environment.yml"),
    ("environment.yml", r" *- gguf==.*\n", "", "gguf: in only one"),
    ("environment.yml", r"\[longbench,ruler\]", "", "lm-eval: other extras"),
    ("environment.yml", r"python=3\.\d+", "python=3.10", "python=3.10 is outside"),
    ("pyproject.toml", r'"tqdm>=.*",\n', "", "tqdm: in only one"),
    ("pyproject.toml", r"torch>=2\.9,<2\.\d+", "torch>=2.9,<2.10", "torch: "),
]


@pytest.mark.parametrize(("file", "pattern", "replacement", "said"), DRIFTS)
def test_every_kind_of_drift_is_seen(file: str, pattern: str, replacement: str, said: str, tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_text((ROOT / name).read_text())
    text = (ROOT / file).read_text()
    drifted = re.sub(pattern, replacement, text, count=1, flags=re.MULTILINE | re.IGNORECASE)
    assert drifted != text
    (tmp_path / file).write_text(drifted)
    assert any(line.startswith(said) for line in disagreements(tmp_path)), disagreements(tmp_path)


@pytest.mark.parametrize("line", ["torch==2.13.0+cpu", "torch>=2.9", "torch @ file:///wheels/torch.whl", "-e ."])
def test_the_lock_holds_exact_portable_pins_only(line: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.lock").write_text(f"tqdm==4.66.0\n{line}\n")
    with pytest.raises(AssertionError, match="not an exact pin"):
        locked_versions(tmp_path)


def test_what_locked_packages_need_is_locked() -> None:
    locked = locked_versions(ROOT)
    for package, version in locked.items():
        try:
            installed = metadata.version(package).partition("+")[0]
        except metadata.PackageNotFoundError:
            installed = ""
        if installed != version:
            continue  # another environment than the locked one runs the tests
        needed = [Requirement(line) for line in metadata.requires(package) or []]
        here = {canonicalize_name(r.name) for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})}
        unlocked = {name for name in here - locked.keys() if not re.match("nvidia|cuda|triton", name)}
        assert not unlocked, f"{package} needs {sorted(unlocked)}"


def test_what_the_package_imports_is_declared() -> None:
    distributions = metadata.packages_distributions()
    names = {name for file in (ROOT / "src").rglob("*.py") for name in _imported(ast.parse(file.read_text()))}
    third_party = names - set(sys.stdlib_module_names) - {"residual_mass", "triton"}  # torch for CUDA brings Triton
    declared = direct_requirements(ROOT)
    for name in third_party:
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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    files = [Path(file) for file in json.loads(run.stdout)]
    assert any(file.name == "partial.py" for file in files)
    for file in files:
        top_level = ast.Module([node for node in ast.parse(file.read_text()).body if not isinstance(node, ast.If)], [])
        at_import = ast.Module([node for node in top_level.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        others = set(_imported(at_import)) - set(sys.stdlib_module_names) - {"residual_mass"} - declared
        assert others == set(), f"{file} imports {sorted(others)}"


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_the_deviations_name_the_locked_versions() -> None:
    document = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(r"^\| (PyTorch|Transformers|lm-evaluation-harness) \|.*\| (\S+) \|$", document, re.MULTILINE)
    )
    locked = locked_versions(ROOT)
    names = {"PyTorch": "torch", "Transformers": "transformers", "lm-evaluation-harness": "lm-eval"}
    assert rows == {title: locked[name] for title, name in names.items()}
