"""Sizes, interpreters, launchers, flags and report entries of the workflow's jobs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from snakemake.io import report
from snakemake.settings.types import DeploymentMethod

from residual_mass.spec.settings import tokens_of
from residual_mass.study.checkout import Wildcards
from residual_mass.study.plan import Plan


@dataclass(frozen=True)
class JobSize:
    """Resources of the jobs of a plan.

    Attributes:
        workflow: Snakemake's `workflow`.
    """

    plan: Plan
    workflow: Any

    def gpus(self, wildcards: Wildcards) -> int:
        return int(self.plan.backbone_spec(wildcards.backbone).requires_gpu)

    def training_gpus(self, wildcards: Wildcards) -> int:
        """Returns the GPUs of one training job: `phi.gpus`, or 0 if the backbone requires no GPU."""
        return self.gpus(wildcards) * self.plan.study_of(wildcards).phi.gpus

    def with_gpu(self, on_a_gpu: int, otherwise: int, gpus: str = "gpus") -> Callable[[Wildcards], int]:
        """Returns a resource: `on_a_gpu` for each of a job's `gpus`, or `otherwise` for a job without a GPU."""
        return lambda wildcards: on_a_gpu * getattr(self, gpus)(wildcards) or otherwise

    def memory(self, wildcards: Wildcards) -> int:
        """Returns the MB of a job that decodes: 64000 for a GPU's host, else 6000 and half of one for each token.

        The twelve methods of the study `second` (0.5B parameters, float32) took 2.6 GiB at 2k and 14.8 at 32,640.
        """
        if self.gpus(wildcards):
            return 64000
        lengths = [wildcards.length] if hasattr(wildcards, "length") else self.plan.study_of(wildcards).runtime.contexts
        return 6000 + max(map(tokens_of, lengths), default=0) // 2

    def half_of_the_cores(self, wildcards: Wildcards) -> int:
        """Two jobs share a machine without a GPU, because a small model gains little from a second core."""
        cores = self.all_of_the_cores(wildcards)
        if self.gpus(wildcards) or self.workflow.remote_exec:
            return 8
        return max(1, min(8, cores // 2))

    def all_of_the_cores(self, _: Wildcards) -> int:
        """Returns all cores, or 8 on a cluster, where Snakemake knows no number of cores."""
        return 8 if self.workflow.remote_exec else self.workflow.resource_settings.cores or 8


def brings_python(workflow: Any) -> bool:
    """Returns whether jobs run in environments with a Python of their own: those of `--sdm conda`, or under
    `--sdm apptainer` the images that rules name.
    """
    asked = workflow.deployment_settings.deployment_method
    in_images = DeploymentMethod.APPTAINER in asked and any(rule.container_img for rule in workflow.rules)
    return DeploymentMethod.CONDA in asked or in_images


def interpreter(workflow: Any) -> str:
    """Returns the Python of jobs as a word of the shell: the one that runs Snakemake, whatever PATH has, or `python`
    within an environment that brings its own.
    """
    return "python" if brings_python(workflow) else shlex.quote(sys.executable)


def launcher(wildcards: Wildcards, resources: Any) -> str:
    """Returns the command that starts the processes of a training.

    It depends on the resources and not on the spec, so that another number of GPUs does not train again. Without exec,
    the SIGTERM that asks for a checkpoint would end the shell, and Snakemake with it.
    """
    if resources.gpu < 2:
        return 'exec "$PYTHON"'
    start = f'"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node {resources.gpu}'
    return f'exec "$PYTHON" -m residual_mass.machine.gpus {resources.gpu} {start}'


def flags(wildcards: Wildcards, input: Any, output: Any) -> str:
    """Returns the named files of a job as flags of its stage, quoted for the shell; assets by their folder."""
    words = []
    for name, files in (*input.items(), *output.items()):
        words.append(f"--{name.replace('_', '-')}")
        for path in [files] if isinstance(files, str) else files:
            words.append(shlex.quote(os.path.dirname(path) if name == "assets" else path))
    return " ".join(words)


def reported(path: str, category: str, caption: str, subcategory: str | None = None, **labels: str) -> Any:
    """Marks an output for Snakemake's report, with a caption of workflow/report/."""
    caption = f"../report/{caption}.rst"
    return report(path, caption=caption, category=category, subcategory=subcategory, labels=labels)
