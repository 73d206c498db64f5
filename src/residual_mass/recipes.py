"""One integer per stage, part of every spec: bump it when a change to the code alters that stage's numbers, and
Snakemake reruns it.
"""

RECIPES = {"prompts": 1, "generate": 1, "score": 1, "train": 1, "capture": 1}
