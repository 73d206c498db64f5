"""Per-head quantities on packed held-out text, and what is read out of them.

Needs: the assets, feature maps, the backbone; RULER's prompts for the corpus cwe.
Makes: results/diagnostics/: heads, mass, rows, kernels_{backbone}_{corpus}_{length}; audit_{backbone}_{corpus}_{length}.csv;
accounting, state_dtype, claims_{backbone}.csv; map_errors_{backbone}_{length}.csv
"""


rule capture:
    input:
        assets=assets_for(HEADS, MASS, ROWS),
        phi=phi_of,
        prompts=prompts_of_packs,
    output:
        heads=HEADS,
        mass=MASS,
        rows=ROWS,
    log:
        "logs/capture/{backbone}_{corpus}_{length}.log",
    benchmark:
        "logs/capture/{backbone}_{corpus}_{length}.tsv"
    conda:
        "../../environment.yml"
    threads: half_of_the_cores
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
        " --phi {input.phi} --prompts {input.prompts} --heads {output.heads} --mass {output.mass} --rows {output.rows}"
        " > {log} 2>&1"


rule audit:
    input:
        rows=ROWS,
        heads=HEADS,
        phi=phi_of,
    output:
        AUDIT,
    log:
        "logs/audit/{backbone}_{corpus}_{length}.log",
    benchmark:
        "logs/audit/{backbone}_{corpus}_{length}.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=with_gpu(12000, 4000),  # the GPU's models have wider maps and longer rows; no GPU is used
        runtime=60,
    params:
        spec=audit_spec,
    message:
        "Measuring a sample of {wildcards.backbone} on {wildcards.corpus} at {wildcards.length} again in float64"
    shell:
        "python -m residual_mass audit --spec {params.spec:q} --rows {input.rows} --heads {input.heads}"
        " --phi {input.phi} --out {output} > {log} 2>&1"


rule kernels:
    input:
        assets=assets_for(KERNELS),
        phi=phi_of_kernels,
        prompts=prompts_of_packs,
    output:
        KERNELS,
    log:
        "logs/kernels/{backbone}_{corpus}_{length}.log",
    benchmark:
        "logs/kernels/{backbone}_{corpus}_{length}.tsv"
    conda:
        "../../environment.yml"
    threads: half_of_the_cores
    resources:
        gpu=gpus,
        mem_mb=with_gpu(64000, 6000),
        runtime=with_gpu(60, 30),
    params:
        spec=kernels_spec,
    message:
        "Kernels of one head of {wildcards.backbone} on {wildcards.corpus} at {wildcards.length}"
    shell:
        'python -m residual_mass kernels --spec {params.spec:q} --assets "$(dirname {input.assets:q})"'
        " --phi {input.phi} --prompts {input.prompts} --out {output} > {log} 2>&1"


rule findings:
    input:
        heads=captured_by(HEADS),
        mass=captured_by(MASS),
        audits=captured_by(AUDIT),  # not read: rows that fail theirs become no table and no claim
    output:
        accounting=ACCOUNTING,
        state_dtype=STATE_DTYPE,
        claims=report(
            CLAIMS,
            caption="../report/claims.rst",
            category="Claims",
            labels={"backbone": "{backbone}"},
        ),
    log:
        "logs/findings/{backbone}.log",
    benchmark:
        "logs/findings/{backbone}.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        spec=findings_spec,
    message:
        "Means and claims out of the rows of {wildcards.backbone}"
    shell:
        "python -m residual_mass findings --spec {params.spec:q} --heads {input.heads} --mass {input.mass}"
        " --accounting {output.accounting} --state-dtype {output.state_dtype} --claims {output.claims} > {log} 2>&1"


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
    threads: half_of_the_cores
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
