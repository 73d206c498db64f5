"""One integer per stage, part of every spec: bump it when a change to the code alters that stage's numbers, and
Snakemake reruns it.
"""

RECIPES = {
    "prompts": 3,
    "train": 3,
    "generate": 6,
    "score": 5,
    "force": 4,
    "fidelity": 2,
    "capture": 5,
    "kernels": 5,
    "findings": 2,
    "residual_errors": 5,
    "runtime": 4,
}
