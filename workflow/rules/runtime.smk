"""What decoding costs: latency, memory and bytes of every method.

Needs: the assets, the backbone; no feature maps, since latency does not depend on their weights.
Makes: results/runtime_{backbone}.csv
"""


rule runtime:
    input:
        assets=plan.assets,
    output:
        paths.RUNTIME,
    log:
        "logs/runtime/{backbone}.log",
    benchmark:
        "logs/runtime/{backbone}.tsv"
    priority: 50  # first, while there are few other jobs: it takes the machine for itself
    conda:
        "../../environment.yml"
    threads: machine.all_of_the_cores
    resources:
        gpu=machine.gpus,
        mem_mb=machine.with_gpu(64000, 6000),
        runtime=machine.with_gpu(240, 60),
    params:
        spec=plan.runtime_spec,
    message:
        "Measuring latencies of {wildcards.backbone}"
    shell:
        'python -m residual_mass runtime --spec {params.spec:q} --assets "$(dirname {input.assets:q})"'
        " --out {output} > {log} 2>&1"
