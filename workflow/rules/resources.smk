"""How much of a machine a job takes, from its wildcards alone; no rules."""


def gpus(wildcards: Any) -> int:
    return int(preflight.needs_gpu(backbone_of(wildcards)))


def half_of_the_cores(wildcards: Any) -> int:
    """Threads of a job: a small model gains little from a second core, so without a GPU two jobs share the machine."""
    cores = cores_here()
    return 8 if gpus(wildcards) or cores is None else max(1, min(8, cores // 2))


def all_of_the_cores(_: Any) -> int:
    return cores_here() or 8


def cores_here() -> int | None:
    """None on a cluster, which has no number of cores; what a job sees there has been given to it alone."""
    return None if workflow.remote_exec else workflow.resource_settings.cores


def training_gpus(wildcards: Any) -> int:
    """GPUs of one training job; none for a backbone that needs none, whatever the study says."""
    return gpus(wildcards) * recipe_phi(wildcards)["gpus"]


def training_memory(on_a_gpu: int, otherwise: int) -> Callable[[Any], int]:
    """Every GPU has a process of its own, with the backbone's weights."""

    def choose(wildcards: Any) -> int:
        return on_a_gpu * training_gpus(wildcards) or otherwise

    return choose


def launcher(wildcards: Any, resources: Any) -> str:
    """What starts a training's processes.

    As a function of the resources it is no reason to train again: another number of GPUs leaves the spec as it is.
    Without exec, the shell in between would die of the SIGTERM that asks for a checkpoint, and Snakemake with it.
    """
    if resources.gpu < 2:
        return "exec python"
    start = f"python -m torch.distributed.run --standalone --nproc-per-node {resources.gpu}"
    return f"exec python -m residual_mass.machine.gpus {resources.gpu} {start}"


def with_gpu(there: int, otherwise: int) -> Callable[[Any], int]:
    """One number for jobs that ask for a GPU and one for jobs that do not."""

    def choose(wildcards: Any) -> int:
        return there if gpus(wildcards) else otherwise

    return choose


def sites() -> set[tuple[str, str]]:
    """Partition and account of every job that is to be submitted; each "" where none is given."""
    jobs = (job for job in workflow.dag.needrun_jobs() if not job.is_local)
    return {tuple(str(job.resources.get(f"slurm_{key}") or "") for key in ("partition", "account")) for job in jobs}
