"""Evaluation: generations of every method and budget from one prefill, then their scores.

Needs: frozen prompts, feature maps, the backbone.
Makes: results/generations/{benchmark}_{backbone}_{length}_{group}/{tasks}.jsonl, results/{benchmark}_{backbone}_{length}.csv,
results/cross_length_mismatch_{backbone}.csv, results/ablation_{ablation}_{backbone}.csv
"""


rule generate:
    input:
        assets=assets_for(GENERATIONS),
        prompts=prompts_of,
        phi=phi_of_group,
    output:
        GENERATIONS,
    log:
        "logs/generate/{benchmark}_{backbone}_{length}_{group}/{tasks}.log",
    benchmark:
        "logs/generate/{benchmark}_{backbone}_{length}_{group}/{tasks}.tsv"
    conda:
        "../../environment.yml"
    threads: half_of_the_cores
    resources:
        gpu=gpus,
        mem_mb=with_gpu(64000, 6000),
        runtime=with_gpu(1440, 240),
    params:
        spec=generate_spec,
        # Declared nowhere, so that finished rows outlive an interrupted job.
        store="results/generations/_store/{benchmark}_{backbone}_{length}_{group}/{tasks}.jsonl",
    message:
        "Generating {wildcards.benchmark} ({wildcards.tasks}, {wildcards.group}) at {wildcards.length} with {wildcards.backbone}"
    shell:
        'python -m residual_mass generate --spec {params.spec:q} --assets "$(dirname {input.assets:q})"'
        " --prompts {input.prompts} --phi {input.phi} --store {params.store} --out {output} > {log} 2>&1"


rule score:
    input:
        prompts=prompts_of,
        generations=generations_of,
    output:
        RESULTS,
    log:
        "logs/score/{benchmark}_{backbone}_{length}.log",
    benchmark:
        "logs/score/{benchmark}_{backbone}_{length}.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        spec=score_spec,
    message:
        "Scoring {wildcards.benchmark} at {wildcards.length} with {wildcards.backbone}"
    shell:
        "python -m residual_mass score --spec {params.spec:q} --prompts {input.prompts}"
        " --generations {input.generations} --out {output} > {log} 2>&1"


use rule score as score_comparison with:
    output:
        COMPARED,
    log:
        "logs/score/{comparison}_{benchmark}_{backbone}_{length}.log",
    benchmark:
        "logs/score/{comparison}_{benchmark}_{backbone}_{length}.tsv"
    message:
        "Scoring {wildcards.benchmark} at {wildcards.length} with {wildcards.backbone} for {wildcards.comparison}"


rule mismatch:
    input:
        results=mismatch_of,
    output:
        MISMATCH,
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
    message:
        "Cross-length mismatch of {wildcards.backbone}"
    shell:
        "python -m residual_mass join --results {input.results} --out {output} > {log} 2>&1"


use rule mismatch as ablation with:
    input:
        results=ablation_of,
    output:
        ABLATION,
    log:
        "logs/join/ablation_{ablation}_{backbone}.log",
    benchmark:
        "logs/join/ablation_{ablation}_{backbone}.tsv"
    message:
        "Ablation {wildcards.ablation} of {wildcards.backbone}"
