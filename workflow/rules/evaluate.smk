"""Evaluation: distances of every arm from full attention on given continuations, and scores of generated answers."""


rule generate:
    input:
        unpack(plan.inputs("generate")),
    output:
        out=paths.GENERATIONS,
    log:
        "logs/generate/{benchmark}_{backbone}_{length}_{group}/{tasks}.log",
    benchmark:
        "logs/generate/{benchmark}_{backbone}_{length}_{group}/{tasks}.tsv"
    priority: lambda wildcards: 20 * (wildcards.benchmark == "ruler" and wildcards.group == "main")  # the first table
    conda:
        "../../environment.yml"
    threads: machine.half_of_the_cores
    resources:
        gpu=machine.gpus,
        mem_mb=machine.memory,
        runtime=machine.with_gpu(1440, 240),
    params:
        stage="generate",
        spec=plan.spec("generate"),
        files=flags,
        # Not declared as an output, so that finished rows outlive an interrupted job.
        store=paths.STORE,
    message:
        "{rule} {wildcards}"
    shell:
        '"$PYTHON" -m residual_mass {params.stage} --spec {params.spec:q} --store {params.store}'
        " {params.files} > {log} 2>&1"


use rule generate as force with:
    input:
        unpack(plan.inputs("force")),
    output:
        out=paths.FORCED,
    log:
        "logs/force/{backbone}_{length}.log",
    benchmark:
        "logs/force/{backbone}_{length}.tsv"
    priority: 20  # the first figure
    resources:
        gpu=machine.gpus,
        mem_mb=machine.memory,
        runtime=machine.with_gpu(480, 240),
    params:
        stage="force",
        spec=plan.spec("force"),
        store=paths.FORCED_STORE,


rule score:
    input:
        unpack(plan.inputs("score")),
    output:
        out=paths.RESULTS,
    log:
        "logs/score/{benchmark}_{backbone}_{length}.log",
    benchmark:
        "logs/score/{benchmark}_{backbone}_{length}.tsv"
    priority: 40
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        stage="score",
        spec=plan.spec("score"),
        files=flags,
    message:
        "{rule} {wildcards}"
    shell:
        '"$PYTHON" -m residual_mass {params.stage} --spec {params.spec:q} {params.files} > {log} 2>&1'


use rule score as score_comparison with:
    output:
        out=paths.COMPARED,
    log:
        "logs/score/{comparison}_{benchmark}_{backbone}_{length}.log",
    benchmark:
        "logs/score/{comparison}_{benchmark}_{backbone}_{length}.tsv"


use rule score as fidelity with:
    input:
        unpack(plan.inputs("fidelity")),
    output:
        out=paths.FIDELITY,
    log:
        "logs/fidelity/{backbone}_{length}.log",
    benchmark:
        "logs/fidelity/{backbone}_{length}.tsv"
    params:
        stage="fidelity",
        spec=plan.spec("fidelity"),


rule mismatch:
    input:
        unpack(plan.inputs("join")),
    output:
        out=paths.MISMATCH,
    log:
        "logs/join/cross_length_mismatch_{backbone}.log",
    benchmark:
        "logs/join/cross_length_mismatch_{backbone}.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        stage="join",
        files=flags,
    message:
        "{rule} {wildcards}"
    shell:
        '"$PYTHON" -m residual_mass {params.stage} {params.files} > {log} 2>&1'


use rule mismatch as ablation with:
    output:
        out=paths.ABLATION,
    log:
        "logs/join/ablation_{ablation}_{backbone}.log",
    benchmark:
        "logs/join/ablation_{ablation}_{backbone}.tsv"
