"""Per-head quantities on packed held-out text.

Needs: the assets, the main feature maps, the backbone.
Makes: results/diagnostics/heads_{backbone}_{corpus}_{length}.parquet, results/diagnostics/map_errors_{backbone}_{length}.csv
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


rule map_errors:
    input:
        assets=assets_for(MAP_ERRORS),
        phi=phi_at_length,
    output:
        MAP_ERRORS,
    log:
        "logs/map_errors/{backbone}_{length}.log",
    benchmark:
        "logs/map_errors/{backbone}_{length}.tsv"
    conda:
        "../../environment.yml"
    threads: 8
    resources:
        gpu=gpus,
        mem_mb=with_gpu(64000, 6000),
        runtime=with_gpu(240, 60),
    params:
        spec=map_errors_spec,
    message:
        "Comparing the feature maps of {wildcards.backbone} at {wildcards.length}"
    shell:
        'python -m residual_mass map-errors --spec {params.spec:q} --assets "$(dirname {input.assets:q})"'
        " --phi {input.phi} --out {output} > {log} 2>&1"
