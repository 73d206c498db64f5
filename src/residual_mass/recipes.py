"""One integer per stage, part of every spec: bump it when a change to the code alters that stage's numbers, and
Snakemake reruns it.
"""

RECIPES = {
    "prompts": 2, "generate": 4, "score": 4, "train": 3, "capture": 4, "kernels": 4, "map_errors": 5, "audit": 1,
    "findings": 2, "runtime": 2,
}  # fmt: skip
