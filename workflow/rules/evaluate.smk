"""Evaluation: distances of every method and budget from full attention on given continuations, and scores of what each
generates from one prefill.

Needs: the assets, frozen prompts, feature maps, the backbone.
Makes: results/forced/{backbone}_{length}.parquet, results/fidelity_{backbone}_{length}.csv,
results/generations/{benchmark}_{backbone}_{length}_{group}/{tasks}.jsonl, results/{benchmark}_{backbone}_{length}.csv,
results/cross_length_mismatch_{backbone}.csv, results/ablation_{ablation}_{backbone}.csv
"""


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
        mem_mb=machine.with_gpu(64000, 6000),
        runtime=machine.with_gpu(1440, 240),
    params:
        stage="generate",
        spec=plan.spec("generate"),
        files=flags,
        # Declared nowhere, so that finished rows outlive an interrupted job.
        store=paths.STORE,
    message:
        "Generating {wildcards.benchmark} ({wildcards.tasks}, {wildcards.group}) at {wildcards.length} with {wildcards.backbone}"
    shell:
        "python -m residual_mass {params.stage} --spec {params.spec:q} --store {params.store}"
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
        mem_mb=machine.with_gpu(64000, 6000),
        runtime=machine.with_gpu(480, 240),
    params:
        stage="force",
        spec=plan.spec("force"),
        files=flags,
        store=paths.FORCED_STORE,
    message:
        "Given continuations under every arm of {wildcards.backbone} at {wildcards.length}"


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
        "Scoring {wildcards.benchmark} at {wildcards.length} with {wildcards.backbone}"
    shell:
        "python -m residual_mass {params.stage} --spec {params.spec:q} {params.files} > {log} 2>&1"


use rule score as score_comparison with:
    output:
        out=paths.COMPARED,
    log:
        "logs/score/{comparison}_{benchmark}_{backbone}_{length}.log",
    benchmark:
        "logs/score/{comparison}_{benchmark}_{backbone}_{length}.tsv"
    message:
        "Scoring {wildcards.benchmark} at {wildcards.length} with {wildcards.backbone} for {wildcards.comparison}"


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
        files=flags,
    message:
        "Fidelity of {wildcards.backbone} at {wildcards.length}"


rule mismatch:
    input:
        unpack(plan.inputs("mismatch")),
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
        files=flags,
    message:
        "Cross-length mismatch of {wildcards.backbone}"
    shell:
        "python -m residual_mass join {params.files} > {log} 2>&1"


use rule mismatch as ablation with:
    input:
        unpack(plan.inputs("ablation")),
    output:
        out=paths.ABLATION,
    log:
        "logs/join/ablation_{ablation}_{backbone}.log",
    benchmark:
        "logs/join/ablation_{ablation}_{backbone}.tsv"
    message:
        "Ablation {wildcards.ablation} of {wildcards.backbone}"
