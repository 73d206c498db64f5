"""Training of the feature maps.

Needs: the assets; for backbones with source hub also the hub.
Makes: results/phi/{backbone}_{maps}.safetensors, results/training_{backbone}_{maps}.csv,
and the same of every variant of the ablations: results/phi/{backbone}_{maps}-{variant}.safetensors
"""


rule train:
    input:
        assets=assets_for(PHI),
    output:
        phi=PHI,
        csv="results/training_{backbone}_{maps}.csv",
    log:
        "logs/train/{backbone}_{maps}.log",
    benchmark:
        "logs/train/{backbone}_{maps}.tsv"
    conda:
        "../../environment.yml"
    threads: 8
    resources:
        gpu=gpus,
        mem_mb=with_gpu(64000, 6000),
        runtime=with_gpu(10080, 120),
    params:
        spec=train_spec,
        # Declared nowhere, for Snakemake deletes the declared outputs of a job that did not finish.
        checkpoint="results/phi/_checkpoints/{backbone}_{maps}.safetensors",
    message:
        "Training the feature maps of {wildcards.backbone} at {wildcards.maps}"
    shell:
        'python -m residual_mass train --spec {params.spec:q} --assets "$(dirname {input.assets:q})"'
        " --checkpoint {params.checkpoint} --out {output.phi} --log-csv {output.csv} > {log} 2>&1"


rule train_variants:
    input:
        assets=assets_for_variants,
    output:
        phi=VARIANTS,
        csv="results/training_{backbone}_{maps}-variants.csv",
    log:
        "logs/train/{backbone}_{maps}-variants.log",
    benchmark:
        "logs/train/{backbone}_{maps}-variants.tsv"
    conda:
        "../../environment.yml"
    threads: 8
    resources:
        gpu=gpus,
        mem_mb=with_gpu(96000, 8000),
        runtime=with_gpu(10080, 240),
    params:
        spec=train_variants_spec,
        checkpoint="results/phi/_checkpoints/{backbone}_{maps}-variants.safetensors",
    message:
        "Training the variants of {wildcards.backbone} at {wildcards.maps}, each teacher pass shared by all"
    shell:
        'python -m residual_mass train --spec {params.spec:q} --assets "$(dirname {input.assets:q})"'
        " --checkpoint {params.checkpoint} --out {output.phi} --log-csv {output.csv} > {log} 2>&1"
