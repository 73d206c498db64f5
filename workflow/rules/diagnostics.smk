"""Per-head quantities on packed held-out text and what is read out of them, and what decoding costs.

Needs: the assets, feature maps, the backbone; RULER's prompts for the corpora made of them.
Makes: results/diagnostics/: heads, mass, kernels_{backbone}_{corpus}_{length}; accounting, claims_{backbone}.csv;
residual_heads_{backbone}_{length}.parquet; results/residual_errors_{backbone}_{length}.csv;
results/runtime_{backbone}.csv
"""


rule capture:
    input:
        unpack(plan.inputs("capture")),
    output:
        heads=paths.HEADS,
        mass=paths.MASS,
    log:
        "logs/capture/{backbone}_{corpus}_{length}.log",
    benchmark:
        "logs/capture/{backbone}_{corpus}_{length}.tsv"
    conda:
        "../../environment.yml"
    threads: machine.half_of_the_cores
    resources:
        gpu=machine.gpus,
        mem_mb=machine.with_gpu(64000, 6000),
        runtime=machine.with_gpu(240, 60),
    params:
        stage="capture",
        spec=plan.spec("capture"),
        files=flags,
    message:
        "Measuring every head of {wildcards.backbone} on {wildcards.corpus} at {wildcards.length}"
    shell:
        "python -m residual_mass {params.stage} --spec {params.spec:q} {params.files} > {log} 2>&1"


use rule capture as kernels with:
    input:
        unpack(plan.inputs("kernels")),
    output:
        out=paths.KERNELS,
    log:
        "logs/kernels/{backbone}_{corpus}_{length}.log",
    benchmark:
        "logs/kernels/{backbone}_{corpus}_{length}.tsv"
    params:
        stage="kernels",
        spec=plan.spec("kernels"),
        files=flags,
    message:
        "Kernels of one head of {wildcards.backbone} on {wildcards.corpus} at {wildcards.length}"


use rule capture as residual_errors with:
    input:
        unpack(plan.inputs("residual_errors")),
    output:
        heads=paths.RESIDUAL_HEADS,
        out=paths.RESIDUAL_ERRORS,
    log:
        "logs/residual_errors/{backbone}_{length}.log",
    benchmark:
        "logs/residual_errors/{backbone}_{length}.tsv"
    resources:
        gpu=machine.gpus,
        mem_mb=machine.with_gpu(64000, 6000),
        runtime=machine.with_gpu(240, 120),
    params:
        stage="residual-errors",
        spec=plan.spec("residual_errors"),
        files=flags,
    message:
        "Comparing methods head by head with {wildcards.backbone} at {wildcards.length}"


use rule capture as runtime with:
    input:
        unpack(plan.inputs("runtime")),
    output:
        out=paths.RUNTIME,
    log:
        "logs/runtime/{backbone}.log",
    benchmark:
        "logs/runtime/{backbone}.tsv"
    priority: 50  # first, while there are few other jobs: it takes the machine for itself
    threads: machine.all_of_the_cores
    params:
        stage="runtime",
        spec=plan.spec("runtime"),
        files=flags,
    message:
        "Measuring latencies of {wildcards.backbone}"


use rule score as findings with:
    input:
        unpack(plan.inputs("findings")),
    output:
        accounting=paths.ACCOUNTING,
        claims=report(
            paths.CLAIMS,
            caption="../report/claims.rst",
            category="Claims",
            labels={"backbone": "{backbone}"},
        ),
    log:
        "logs/findings/{backbone}.log",
    benchmark:
        "logs/findings/{backbone}.tsv"
    priority: 0
    params:
        stage="findings",
        spec=plan.spec("findings"),
        files=flags,
    message:
        "Means and claims out of the rows of {wildcards.backbone}"
