"""A copy of the repository whose mini study is small and runs on the random Llama of `small_assets`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml
from tests.small_assets import MODEL_ID, REVISION, write_assets

from residual_mass.files import sha256_of, write_text
from residual_mass.texts.assets import WHEEL_PINS, read_pins

ROOT = Path(__file__).parents[1]
EXAMPLES = Path(__file__).with_name("small_examples")
"""Examples of BABILong and LongBench that fill 1k in tokens of the small tokenizer."""


def write_small_study(folder: Path, root: Path = ROOT) -> None:
    """Of the checkout in `root`. Its assets are made already; nothing has run yet."""
    junk = shutil.ignore_patterns(".git", ".venv", "results", "logs", ".snakemake", ".pytest_cache", "__pycache__")
    shutil.copytree(root, folder, ignore=junk)
    give_examples(folder / "src" / "residual_mass" / "benchmarks" / "examples")
    write_assets(folder / "results" / "assets")
    enough_paragraphs(folder / "results" / "assets" / "qa" / "hotpotqa.json")
    speech = folder / "results" / "assets" / "corpora" / "sotu" / "1790-Washington-1.txt"
    speech.parent.mkdir(parents=True)
    speech.write_text("Fellow citizens of the Senate and House of Representatives. " * 70)
    vouch(folder / "results" / "assets", read_pins(WHEEL_PINS))
    tiny = {
        "title": "Tiny & random_Llama", "study": "mini", "model_id": MODEL_ID, "revision": REVISION, "source": "assets",
        "dtype": "float32", "tokenizer": "tiny", "context": 4096, "requires_gpu": False,
    }  # fmt: skip
    config = yaml.safe_load((folder / "config" / "config.yaml").read_text())
    config["backbones"] = {"tiny": tiny}
    config["variants"] = {"dphi_4": {"map": {"d_phi": 4}}, "kl_only": {"objective": {"name": "kl"}}}
    config["ablations"] = {"dphi": ["dphi_4", "ours"], "loss": ["ours", "kl_only"]}
    (folder / "config" / "config.yaml").write_text(yaml.safe_dump(config))
    of_methods = yaml.safe_load((folder / "config" / "studies" / "methods.yaml").read_text())
    for name in ("paper", "methods", "second"):  # their backbones are gone
        (folder / "config" / "studies" / f"{name}.yaml").unlink()
    study = folder / "config" / "studies" / "mini.yaml"
    protocol = yaml.safe_load(study.read_text())
    benchmarks, tables = protocol["benchmarks"], list(dict.fromkeys([*of_methods["tables"], *protocol["tables"]]))
    for settings in benchmarks.values():
        settings |= {"examples": 2, "answer_margin": 0, "batch_tokens": 1}
    benchmarks["longbench"]["lengths"] = ["1k"]  # where two of its tasks are left out
    phi = {"steps": 6, "queries_per_step": 4, "checkpoint_every": 2, "eval_every": 3, "warmup_steps": 1}
    phi |= {
        "held_out": ["wiki", "books"],
        "corpora": ["wiki", "pydoc"],
        "map": {"kind": "rezero", "d_emb": 16, "d_phi": 8, "init": "positive_random_features"},
    }
    edited(
        study, lengths=["1k"], budgets=[2, 4], truncate_to="1k", maps={"main": "1k", "trained": ["512", "1k"]},
        benchmarks=benchmarks, phi=phi,
        fidelity={
            "lengths": ["1k"], "corpora": ["wiki"], "documents": 3, "tokens": 5, "examples": 2,
            "prompts_at": ["1k"], "methods": ["topk_moments_8"], "benchmarks": ["ruler", "babilong"],
        },
        mismatch={"backbones": ["tiny"], "maps": ["512", "1k"], "lengths": ["1k"]},
        ablations={"backbones": ["tiny"], "benchmarks": ["ruler", "babilong"]},
        diagnostics={
            "backbones": ["tiny"], "packs": 2, "queries": 2, "lengths": ["1k"],
            "head": {"layer": 1, "head": 3},
        },
        residuals={
            "backbones": ["tiny"], "corpora": ["wiki"], "lengths": ["1k"], "packs": 2, "queries": 2,
            "budgets": [0.5, 1, 2, 4, 8, 16], "methods": ["topk", "topk_phi", *of_methods["residuals"]["methods"][1:]],
        },
        runtime={"contexts": ["512"], "batches": [1, 2], "repeats": 1},
        tables=[label.replace("runtime_smol", "runtime_tiny") for label in tables],
        figures={
            "fidelity": {"backbone": "tiny", "texts": ["wiki", "ruler"], "lengths": ["1k"]},
            "fidelity_tokens": {"backbone": "tiny", "text": "wiki", "length": "1k"},
            "fidelity_tokens_ruler": {"backbone": "tiny", "text": "ruler", "length": "1k"},
            **{
                label: {"backbone": "tiny", "texts": ["wiki"], "lengths": ["1k"]}
                for label in ("error_by_k", "selection_recall", "fidelity_by_bytes")
            },
            "entropy_gain": {"backbones": ["tiny"], "corpus": "wiki", "length": "1k"},
            **{
                label: {"backbone": "tiny", "corpus": "wiki", "length": "1k"}
                for label in (
                    "kernel_sanity", "entropy_heatmap", "mass_curves", "quartile_error", "fixedk_breakdown_smol",
                    "fixedk_breakdown_smol_cwe",
                )
            },
            "logz_calibration": {"backbone": "tiny", "corpora": ["wiki", "cwe"], "lengths": ["1k"]},
            "fullsub_nosub_delta": {"backbone": "tiny", "corpora": ["wiki", "cwe"], "lengths": ["1k"]},
            "ablation_kernel_fidelity": {"backbone": "tiny", "corpus": "wiki", "variants": ["kl_only", "dphi_4"]},
            "training_curves": {"backbone": "tiny", "maps": ["512", "1k"]},
        },
    )  # fmt: skip


def give_examples(folder: Path) -> None:
    """Adds the small examples to those of a checkout, in place of files of the same name."""
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    lines = [f"{sha256_of(file)}  {file.name}\n" for file in sorted(folder.glob("*.jsonl"))]
    write_text(folder / "sha256.txt", "".join(lines))


def vouch(assets: Path, pins: dict[str, str]) -> None:
    """Writes the assets' manifest."""
    (assets / "manifest.json").unlink(missing_ok=True)
    files = [file for file in sorted(assets.rglob("*")) if file.is_file()]
    entries = [{"path": file.relative_to(assets).as_posix(), "sha256": sha256_of(file)} for file in files]
    (assets / "manifest.json").write_text(json.dumps({"pins": pins, "files": entries}))


def edited(path: Path, **changes: Any) -> None:
    content = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(content.get(key), dict):
            content[key] |= value
        else:
            content[key] = value
    path.write_text(yaml.safe_dump(content))


def enough_paragraphs(hotpotqa: Path) -> None:
    """Adds paragraphs until some of them are held out of training."""
    items = json.loads(hotpotqa.read_text())
    for i in range(2000):
        context = [[f"Station {i}", [f"Station {i} lies {i * 37 % 91} leagues from the coast. ", "Few trains stop."]]]
        question = {"question": f"How far is station {i}?", "answer": str(i * 37 % 91), "type": ""}
        items.append(question | {"context": context})
    hotpotqa.write_text(json.dumps(items))
