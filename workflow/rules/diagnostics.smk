"""Per-head quantities on packed held-out text, findings from them, and the costs of decoding."""


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
        mem_mb=machine.memory,
        runtime=machine.with_gpu(240, 120),
    params:
        stage="capture",
        spec=plan.spec("capture"),
        files=flags,
    message:
        "{rule} {wildcards}"
    shell:
        '"$PYTHON" -m residual_mass {params.stage} --spec {params.spec:q} {params.files} > {log} 2>&1'


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
    params:
        stage="residual-errors",
        spec=plan.spec("residual_errors"),


use rule capture as runtime with:
    input:
        unpack(plan.inputs("runtime")),
    output:
        out=paths.RUNTIME,
    log:
        "logs/runtime/{backbone}.log",
    benchmark:
        "logs/runtime/{backbone}.tsv"
    priority: 50  # early, while there are few other jobs, because it takes the whole machine
    threads: machine.all_of_the_cores
    params:
        stage="runtime",
        spec=plan.spec("runtime"),


use rule score as findings with:
    input:
        unpack(plan.inputs("findings")),
    output:
        accounting=paths.ACCOUNTING,
        claims=reported(paths.CLAIMS, "Claims", "claims", backbone="{backbone}"),
    log:
        "logs/findings/{backbone}.log",
    benchmark:
        "logs/findings/{backbone}.tsv"
    params:
        stage="findings",
        spec=plan.spec("findings"),
