"""Reproduction of "Residual-Mass Accounting for Partial-KV Decoding".

snakemake --cores 8 all                          the study named in config/config.yaml
snakemake --cores 8 all --config study=paper     another study (targets come before --config)
snakemake --cores 8 results/ruler_1b_64k.csv     one result, under any study
snakemake --cores 1 pdf                          all tables and figures of the study in one PDF (needs LaTeX)
snakemake --cores 1 published                    the paper's own twelve tables, from the values it prints
snakemake -n                                     the study's jobs; the last line says what this machine lacks, and the hours
snakemake --cores 1 estimate                     the hours that the study takes
snakemake --cores 1 prefetch                     everything that the study downloads, in the assets folder
snakemake --cores 1 verify                       whether results are as recorded
snakemake --cores 1 crate                        what made the results from what, in ro-crate-metadata.json
"""

import atexit
import json
import shlex
import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.18.1")

ROOT = Path(workflow.current_basedir)  # of this file, which workflow/Snakefile includes
SOURCE = str(ROOT / "src")
sys.path.insert(0, SOURCE)
if set(SOURCE) & set(":{}\n"):
    sys.exit(f"{SOURCE!r}: PYTHONPATH and Snakemake misread a colon, a brace and a line break in it; move the checkout")

from residual_mass.paper import published as of_the_paper
from residual_mass.spec import paths
from residual_mass.study import progress, start
from residual_mass.study.plan import check_files, load_plan
from residual_mass.study.resources import JobSize, flags, interpreter, launcher, reported
from residual_mass.texts.assets import WHEEL_PINS, read_pins

check_files(ROOT, workflow.overwrite_configfiles)


configfile: ROOT / "config/config.yaml"


report: "workflow/report/workflow.rst"


plan = load_plan(ROOT, config)
machine = JobSize(plan, workflow)
study = plan.main.study
ASSETS = shlex.quote(str(plan.assets_folder))

NO_NETWORK = "export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1; "


# Unknown names match these patterns, so that `Plan` refuses them in one line that lists the known names.
wildcard_constraints:
    backbone=r"[a-z0-9][a-z0-9.-]*",
    benchmark=r"(?!training_|runtime_|fidelity_)[a-z0-9]+",
    corpus=r"[a-z0-9]+",
    comparison=r"[a-z0-9]+",
    group=r"main|mismatch|ablation",
    ablation=r"[a-z0-9]+",
    label=r"(?!(comparison|main|numbers)\.)(?:runtime_[a-z0-9.-]+|[a-z0-9_]+)",
    length=r"[1-9][0-9]*k?",
    maps=r"[1-9][0-9]*k?",
    study=r"(?!published/)[A-Za-z0-9_-]+",
    tasks=r"[a-z0-9_]+",
    tokenizer=r"[a-z0-9][a-z0-9.-]*",


include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/diagnostics.smk"
include: "workflow/rules/paper.smk"
include: "workflow/rules/utilities.smk"


# A prefix replaces Snakemake's own strict mode. With PYTHONPATH, conda environments do not need the package installed.
# It reads braces as fields; the rules are known here, of which `interpreter` asks for images of containers.
PYTHON = interpreter(workflow).replace("{", "{{").replace("}", "}}")
shell.prefix(
    f"set -euo pipefail; PYTHON={PYTHON}; export PYTHONPATH={shlex.quote(SOURCE)}${{{{PYTHONPATH:+:$PYTHONPATH}}}}; "
    + NO_NETWORK * plan.main.offline
)


rule all:
    default_target: True
    input:
        plan.targets(study),
    localrule: True


rule pdf:
    input:
        expand(paths.DOCUMENT_PDF, study=study),
    localrule: True


rule published:
    input:
        expand(paths.PUBLISHED_TABLE, label=of_the_paper.labels()),
    localrule: True


# Snakemake has no handler for the end of a dry run.
atexit.register(start.print_dry_run_summary, plan, workflow, Path.cwd())


onstart:
    if lacking := start.problems(plan, workflow):
        sys.exit("; ".join(lacking))
    start.write_jobs(plan, workflow)
    progress.follow(workflow, Path("results"))


onsuccess:
    if start.makes_the_page(workflow):
        print(*start.closing_lines(plan), sep="\n", file=sys.stderr)
