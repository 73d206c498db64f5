"""Training of the feature maps; one job trains all variants of the ablations, which share each teacher pass."""


rule train:
    input:
        unpack(plan.inputs("train")),
    output:
        out=paths.PHI,
        log_csv=reported(paths.TRAINING_LOG, "Training", "training", backbone="{backbone}", maps="{maps}"),
    log:
        "logs/train/{backbone}_{maps}.log",
    benchmark:
        "logs/train/{backbone}_{maps}.tsv"
    priority: 30  # the first results, distances and scores, need it
    conda:
        "../../environment.yml"
    threads: machine.half_of_the_cores
    resources:
        gpu=machine.training_gpus,
        mem_mb=machine.with_gpu(64000, 6000, "training_gpus"),
        runtime=machine.with_gpu(10080, 120),
    params:
        spec=plan.spec("train"),
        files=flags,
        launcher=launcher,
        # Not declared as an output, because Snakemake deletes the outputs of a job that did not finish.
        checkpoint=paths.CHECKPOINT,
    message:
        "{rule} {wildcards}"
    shell:
        "{params.launcher} -m residual_mass train --spec {params.spec:q} --checkpoint {params.checkpoint}"
        " {params.files} > {log} 2>&1"


use rule train as train_variants with:
    input:
        unpack(plan.inputs("train_variants")),
    output:
        out=plan.variants_phi,
        log_csv=reported(paths.VARIANTS_LOG, "Training", "training", backbone="{backbone}", maps="{maps}, variants"),
    log:
        "logs/train/{backbone}_{maps}-variants.log",
    benchmark:
        "logs/train/{backbone}_{maps}-variants.tsv"
    priority: 10  # the longest job of a small study, and many others need it
    resources:
        gpu=machine.training_gpus,
        mem_mb=machine.with_gpu(96000, 8000, "training_gpus"),
        runtime=machine.with_gpu(10080, 240),
    params:
        spec=plan.spec("train_variants"),
        checkpoint=paths.VARIANTS_CHECKPOINT,
