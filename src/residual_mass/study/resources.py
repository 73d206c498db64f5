"""What rules say of their jobs besides inputs, outputs and spec: the size of a job, its launcher and its flags."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from snakemake.io import report

from residual_mass.study.plan import Plan, Wildcards


@dataclass(frozen=True)
class JobSize:
    """Resources of the jobs of a plan.

    Attributes:
        workflow: Snakemake's.
    """

    plan: Plan
    workflow: Any

    def gpus(self, wildcards: Wildcards) -> int:
        return int(self.plan.backbone_spec(wildcards.backbone).requires_gpu)

    def training_gpus(self, wildcards: Wildcards) -> int:
        """GPUs of one training job; none for a backbone that requires none, whatever the study says."""
        return self.gpus(wildcards) * self.plan.study_of(wildcards).phi.gpus

    def with_gpu(self, on_a_gpu: int, otherwise: int, gpus: str = "gpus") -> Callable[[Wildcards], int]:
        """One number for jobs that do not ask for a GPU, and one that those that do have for each of their `gpus`."""
        return lambda wildcards: on_a_gpu * getattr(self, gpus)(wildcards) or otherwise

    def half_of_the_cores(self, wildcards: Wildcards) -> int:
        """A small model gains little from a second core, so without a GPU two jobs share the machine."""
        cores = self.all_of_the_cores(wildcards)
        return 8 if self.gpus(wildcards) or self.workflow.remote_exec else max(1, min(8, cores // 2))

    def all_of_the_cores(self, _: Wildcards) -> int:
        """On a cluster, which has no number of cores, 8: what a job sees there has been given to it alone."""
        return 8 if self.workflow.remote_exec else self.workflow.resource_settings.cores or 8


def launcher(wildcards: Wildcards, resources: Any) -> str:
    """What starts the processes of a training.

    A function of the resources, so that another number of GPUs, which leaves the spec as it is, trains nothing again.
    Without exec, the shell in between would die of the SIGTERM that asks for a checkpoint, and Snakemake with it.
    """
    if resources.gpu < 2:
        return "exec python"
    start = f"python -m torch.distributed.run --standalone --nproc-per-node {resources.gpu}"
    return f"exec python -m residual_mass.machine.gpus {resources.gpu} {start}"


def flags(wildcards: Wildcards, input: Any, output: Any) -> str:
    """The named files of a job as flags of its stage, quoted for the shell; the assets by their folder."""
    words = []
    for name, files in (*input.items(), *output.items()):
        paths = [files] if isinstance(files, str) else files
        words += [f"--{name.replace('_', '-')}"]
        words += [shlex.quote(os.path.dirname(path) if name == "assets" else path) for path in paths]
    return " ".join(words)


def shown(path: str, category: str, caption: str, subcategory: str | None = None, **labels: str) -> Any:
    """An output that Snakemake's report shows, with a caption of workflow/report/."""
    caption = f"../report/{caption}.rst"
    return report(path, caption=caption, category=category, subcategory=subcategory, labels=labels)
