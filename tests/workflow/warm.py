"""Imported once by the process from which tests/forks.py forks Snakemake: does all imports and shared set-up."""

from __future__ import annotations

import sys
from pathlib import Path

import smart_open  # noqa: F401
import yaml
from snakemake import cli, linting, workflow  # noqa: F401

from residual_mass.study import resources, start  # noqa: F401
from residual_mass.study.plan import load_plan

ROOT = Path(__file__).parents[2]
cli.get_argument_parser()  # finds the plugins
load_plan(ROOT, yaml.safe_load((ROOT / "config" / "config.yaml").read_text()))
if heavy := {"torch", "transformers"} & set(sys.modules):
    raise ImportError(f"the workflow imports {' and '.join(heavy)}")
