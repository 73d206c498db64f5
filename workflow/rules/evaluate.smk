"""Evaluation: generations of every method and budget from one prefill, then their scores.

Needs: frozen prompts, feature maps, the backbone.
Makes: results/generations/{benchmark}_{backbone}_{length}_{maps}/{tasks}.jsonl, results/{benchmark}_{backbone}_{length}.csv
"""


rule generate:
    input:
        assets=assets_for(GENERATIONS),
        prompts=prompts_of,
        phi=phi_of,
    output:
        GENERATIONS,
    log:
        "logs/generate/{benchmark}_{backbone}_{length}_{maps}/{tasks}.log",
    benchmark:
        "logs/generate/{benchmark}_{backbone}_{length}_{maps}/{tasks}.tsv"
    conda:
        "../../environment.yml"
    threads: 8
    resources:
        gpu=gpus,
        mem_mb=with_gpu(64000, 6000),
        runtime=with_gpu(1440, 240),
    params:
        spec=generate_spec,
        # Declared nowhere, so that finished rows outlive an interrupted job.
        store="results/generations/_store/{benchmark}_{backbone}_{length}_{maps}/{tasks}.jsonl",
    message:
        "Generating {wildcards.benchmark} ({wildcards.tasks}) at {wildcards.length} with {wildcards.backbone}"
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
