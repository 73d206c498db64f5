"""Every file name of the workflow, with its wildcards; no code parses a file name."""

from __future__ import annotations

from residual_mass.spec.labels import PUBLISHED

MANIFEST = "manifest.json"
"""Lists the files of a folder with their sha256."""

PROMPTS = "results/prompts/{benchmark}_{tokenizer}_{length}/" + MANIFEST

PHI = "results/phi/{backbone}_{maps}.safetensors"
TRAINING_LOG = "results/training_{backbone}_{maps}.csv"
CHECKPOINT = "results/phi/_checkpoints/{backbone}_{maps}.safetensors"
VARIANT_PHI = "results/phi/{backbone}_{maps}-{variant}.safetensors"
VARIANTS_LOG = "results/training_{backbone}_{maps}-variants.csv"
VARIANTS_CHECKPOINT = "results/phi/_checkpoints/{backbone}_{maps}-variants.safetensors"

GENERATIONS = "results/generations/{benchmark}_{backbone}_{length}_{group}/{tasks}.jsonl"
STORE = "results/generations/_store/{benchmark}_{backbone}_{length}_{group}/{tasks}.jsonl"
RESULTS = "results/{benchmark}_{backbone}_{length}.csv"
COMPARED = "results/compared/{comparison}/{benchmark}_{backbone}_{length}.csv"
MISMATCH = "results/cross_length_mismatch_{backbone}.csv"
ABLATION = "results/ablation_{ablation}_{backbone}.csv"

FORCED = "results/forced/{backbone}_{length}.parquet"
FORCED_STORE = "results/forced/_store/{backbone}_{length}.jsonl"
FIDELITY = "results/fidelity_{backbone}_{length}.csv"

HEADS = "results/diagnostics/heads_{backbone}_{corpus}_{length}.parquet"
MASS = "results/diagnostics/mass_{backbone}_{corpus}_{length}.parquet"
KERNELS = "results/diagnostics/kernels_{backbone}_{corpus}_{length}.parquet"
RESIDUAL_HEADS = "results/diagnostics/residual_heads_{backbone}_{length}.parquet"
RESIDUAL_ERRORS = "results/residual_errors_{backbone}_{length}.csv"
ACCOUNTING = "results/diagnostics/accounting_{backbone}.csv"
CLAIMS = "results/diagnostics/claims_{backbone}.csv"

RUNTIME = "results/runtime_{backbone}.csv"

TABLE = "paper_tables/{study}/{label}.tex"
CELLS = "paper_tables/{study}/{label}.csv"
PUBLISHED_TABLE = f"paper_tables/{PUBLISHED}/{{label}}.tex"
COMPARISON = "paper_tables/{study}/comparison.csv"
NUMBERS = "paper_tables/{study}/numbers.tex"
FIGURE_PDF = "paper_tables/{study}/figures/{label}.pdf"
FIGURE_PNG = "paper_tables/{study}/figures/{label}.png"
DOCUMENT = "paper_tables/{study}/main.tex"
DOCUMENT_PDF = "paper_tables/{study}/main.pdf"
REPORT = "results/report.html"
"""The page of the study that the configuration names."""

TEMPLATE = "paper_tables/templates/{name}.tex.j2"
PAGE_TEMPLATE = "paper_tables/templates/report.html.j2"
PINS = "src/residual_mass/texts/wheels.txt"
PUBLISHED_VALUES = "src/residual_mass/paper/published/{label}.csv"

JOBS = "logs/{target}.json"
"""The jobs that the target `estimate` or `prefetch` reads, written when the run starts."""
