"""Evaluation: distances of every method and budget from full attention on given continuations, and scores of what each
generates from one prefill.

Needs: the assets, frozen prompts, feature maps, the backbone.
Makes: results/forced/{backbone}_{length}.parquet, results/fidelity_{backbone}_{length}.csv,
results/generations/{benchmark}_{backbone}_{length}_{group}/{tasks}.jsonl, results/{benchmark}_{backbone}_{length}.csv,
results/cross_length_mismatch_{backbone}.csv, results/ablation_{ablation}_{backbone}.csv,
"""


rule force:
    input:
        assets=plan.assets,
        prompts=plan.force_prompts,
        phi=plan.force_phi,
    output:
        paths.FORCED,
    log:
        "logs/force/{backbone}_{length}.log",
    benchmark:
        "logs/force/{backbone}_{length}.tsv"
    priority: 20  # the first figure
    conda:
        "../../environment.yml"
    threads: machine.half_of_the_cores
    resources:
        gpu=machine.gpus,
        mem_mb=machine.with_gpu(64000, 6000),
        runtime=machine.with_gpu(480, 240),
    params:
        spec=plan.force_spec,
        # Declared nowhere, so that finished rows outlive an interrupted job.
        store=paths.FORCED_STORE,
    message:
        "Given continuations under every arm of {wildcards.backbone} at {wildcards.length}"
    shell:
        'python -m residual_mass force --spec {params.spec:q} --assets "$(dirname {input.assets:q})"'
        " --prompts {input.prompts} --phi {input.phi} --store {params.store} --out {output} > {log} 2>&1"


rule fidelity:
    input:
        paths.FORCED,
    output:
        paths.FIDELITY,
    log:
        "logs/fidelity/{backbone}_{length}.log",
    benchmark:
        "logs/fidelity/{backbone}_{length}.tsv"
    priority: 40
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        spec=plan.fidelity_spec,
    message:
        "Fidelity of {wildcards.backbone} at {wildcards.length}"
    shell:
        "python -m residual_mass fidelity --spec {params.spec:q} --forced {input} --out {output} > {log} 2>&1"


rule generate:
    input:
        assets=plan.assets,
        prompts=plan.prompts_of,
        phi=plan.group_phi,
    output:
        paths.GENERATIONS,
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
        spec=plan.generate_spec,
        # Declared nowhere, so that finished rows outlive an interrupted job.
        store=paths.STORE,
    message:
        "Generating {wildcards.benchmark} ({wildcards.tasks}, {wildcards.group}) at {wildcards.length} with {wildcards.backbone}"
    shell:
        'python -m residual_mass generate --spec {params.spec:q} --assets "$(dirname {input.assets:q})"'
        " --prompts {input.prompts} --phi {input.phi} --store {params.store} --out {output} > {log} 2>&1"


rule score:
    input:
        prompts=plan.prompts_of,
        generations=plan.generations_of,
    output:
        paths.RESULTS,
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
        spec=plan.score_spec,
    message:
        "Scoring {wildcards.benchmark} at {wildcards.length} with {wildcards.backbone}"
    shell:
        "python -m residual_mass score --spec {params.spec:q} --prompts {input.prompts}"
        " --generations {input.generations} --out {output} > {log} 2>&1"


use rule score as score_comparison with:
    output:
        paths.COMPARED,
    log:
        "logs/score/{comparison}_{benchmark}_{backbone}_{length}.log",
    benchmark:
        "logs/score/{comparison}_{benchmark}_{backbone}_{length}.tsv"
    message:
        "Scoring {wildcards.benchmark} at {wildcards.length} with {wildcards.backbone} for {wildcards.comparison}"


rule mismatch:
    input:
        results=plan.mismatch_results,
    output:
        paths.MISMATCH,
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
        results=plan.ablation_results,
    output:
        paths.ABLATION,
    log:
        "logs/join/ablation_{ablation}_{backbone}.log",
    benchmark:
        "logs/join/ablation_{ablation}_{backbone}.tsv"
    message:
        "Ablation {wildcards.ablation} of {wildcards.backbone}"
