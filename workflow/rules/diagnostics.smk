"""Per-head quantities on packed held-out text.

Needs: the assets, the main feature maps, the backbone.
Makes: results/diagnostics/heads_{backbone}_{corpus}_{length}.parquet
"""


rule capture:
    input:
        assets=assets_for(HEADS),
        phi=phi_of,
    output:
        HEADS,
    log:
        "logs/capture/{backbone}_{corpus}_{length}.log",
    benchmark:
        "logs/capture/{backbone}_{corpus}_{length}.tsv"
    conda:
        "../../environment.yml"
    threads: 8
    resources:
        gpu=gpus,
        mem_mb=with_gpu(64000, 6000),
        runtime=with_gpu(240, 60),
    params:
        spec=capture_spec,
    message:
        "Measuring every head of {wildcards.backbone} on {wildcards.corpus} at {wildcards.length}"
    shell:
        'python -m residual_mass capture --spec {params.spec:q} --assets "$(dirname {input.assets:q})"'
        " --phi {input.phi} --out {output} > {log} 2>&1"
