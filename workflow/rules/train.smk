"""Training of the feature maps.

Needs: the assets; for backbones with source hub also the hub.
Makes: results/phi/{backbone}_{maps}.safetensors, results/training_{backbone}_{maps}.csv,
and of every variant of the ablations: results/phi/{backbone}_{maps}-{variant}.safetensors
"""


rule train:
    input:
        unpack(plan.inputs("train")),
    output:
        out=paths.PHI,
        log_csv=report(
            paths.TRAINING_LOG,
            caption="../report/training.rst",
            category="Training",
            labels={"backbone": "{backbone}", "maps": "{maps}"},
        ),
    log:
        "logs/train/{backbone}_{maps}.log",
    benchmark:
        "logs/train/{backbone}_{maps}.tsv"
    priority: 30  # distances and scores, the first results, wait for it
    conda:
        "../../environment.yml"
    threads: machine.half_of_the_cores
    resources:
        gpu=machine.training_gpus,
        mem_mb=machine.training_memory(64000, 6000),
        runtime=machine.with_gpu(10080, 120),
    params:
        spec=plan.spec("train"),
        files=flags,
        launcher=launcher,
        # Declared nowhere, for Snakemake deletes the declared outputs of a job that did not finish.
        checkpoint=paths.CHECKPOINT,
    message:
        "Training the feature maps of {wildcards.backbone} at {wildcards.maps}"
    shell:
        "{params.launcher} -m residual_mass train --spec {params.spec:q} --checkpoint {params.checkpoint}"
        " {params.files} > {log} 2>&1"


use rule train as train_variants with:
    input:
        unpack(plan.inputs("train_variants")),
    output:
        out=plan.variants_phi,
        log_csv=report(
            paths.VARIANTS_LOG,
            caption="../report/training.rst",
            category="Training",
            labels={"backbone": "{backbone}", "maps": "{maps}, variants"},
        ),
    log:
        "logs/train/{backbone}_{maps}-variants.log",
    benchmark:
        "logs/train/{backbone}_{maps}-variants.tsv"
    priority: 10  # the longest job of a small study, with many others after it
    resources:
        gpu=machine.training_gpus,
        mem_mb=machine.training_memory(96000, 8000),
        runtime=machine.with_gpu(10080, 240),
    params:
        spec=plan.spec("train_variants"),
        files=flags,
        launcher=launcher,
        checkpoint=paths.VARIANTS_CHECKPOINT,
    message:
        "Training the variants of {wildcards.backbone} at {wildcards.maps}, each teacher pass shared by all"
