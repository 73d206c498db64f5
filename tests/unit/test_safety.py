"""Files that are read cannot run code or write elsewhere: no pickles, no remote code, no archive leaves its folder."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.conftest import TINY

from residual_mass.model.loading import load_backbone
from residual_mass.spec.specs import BackboneSpec

ROOT = Path(__file__).parents[2]
SOURCES = sorted([ROOT / "Snakefile", *(ROOT / "workflow").rglob("*.smk"), *(ROOT / "src").rglob("*.py")])
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "telnetlib", "ftplib"}
CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "torch.hub.load", "numpy.load", "np.load",
    "pandas.read_pickle", "pd.read_pickle", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen",
    "subprocess.getoutput", "tempfile.mktemp", "zipfile.extractall", "tarfile.open",
}  # fmt: skip
KEYWORDS = {"trust_remote_code", "allow_pickle", "shell"}
LOADERS = ("from_pretrained", "from_config", "load_dataset")
"""Functions that ask on the terminal whether to run a repository's code, unless they are told not to."""


def unsafe(tree: ast.AST) -> Iterator[str]:
    """What a module imports, calls or passes that could run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name.rpartition(".")[2] in ("extractall", "read_pickle", "to_pickle"):
                yield name
            off = {word.arg for word in node.keywords if ast.unparse(word.value) == "False"}
            yield from (f"{word.arg}=" for word in node.keywords if word.arg in KEYWORDS - off)
            if name.rpartition(".")[2] in LOADERS and "trust_remote_code" not in off:
                yield name


def test_no_module_reads_what_could_run() -> None:
    modules = [path for path in SOURCES if path.suffix == ".py"]
    found = {str(path): list(unsafe(ast.parse(path.read_text(encoding="utf-8")))) for path in modules}
    assert len(found) > 50 and {name: what for name, what in found.items() if what} == {}
    planted = [
        "from joblib import load", "torch.load(path)", "Model(name, trust_remote_code=True)", "a.extractall(b)",
        "AutoConfig.from_pretrained(name)", "load_dataset(name, trust_remote_code=trusted)",
    ]  # fmt: skip
    assert all(list(unsafe(ast.parse(line))) for line in planted)


def test_no_rule_reads_what_could_run() -> None:
    """Rules are not quite Python, so they are searched as text."""
    forbidden = re.compile(rf"\b({'|'.join(MODULES)}|eval\(|exec\(|os\.system|unsafe_load|trust_remote_code)")
    for path in (path for path in SOURCES if path.suffix != ".py"):
        assert not forbidden.search(path.read_text(encoding="utf-8")), path


class Payload:
    """A pickle that makes a file as soon as it is loaded."""

    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.victim,)


def test_weights_that_are_a_pickle_are_refused_and_not_run(tiny_assets: Path, tmp_path: Path) -> None:
    """A folder of the assets, and one that stands for the hub, whose loader takes pickles unless it is told not to."""
    folder = tmp_path / "models" / "tiny-llama"
    folder.mkdir(parents=True)
    for file in (tiny_assets / "models" / "tiny-llama").iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    torch.save({"model.norm.weight": Payload(tmp_path / "pwned")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model\.safetensors: no such file"):
        load_backbone(TINY, tmp_path, torch.device("cpu"))
    on_hub = BackboneSpec(**{**vars(TINY), "source": "hub", "model_id": str(folder)})
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_backbone(on_hub, tmp_path, torch.device("cpu"))
    assert not (tmp_path / "pwned").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "pwned").exists()  # where it is run
