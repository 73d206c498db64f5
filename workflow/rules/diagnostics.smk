"""Per-head quantities on packed held-out text, and what is read out of them.

Needs: the assets, feature maps, the backbone; RULER's prompts for the corpora made of them.
Makes: results/diagnostics/: heads, mass, kernels_{backbone}_{corpus}_{length};
accounting, claims_{backbone}.csv;
residual_heads_{backbone}_{length}.parquet; and results/residual_errors_{backbone}_{length}.csv
"""


rule capture:
    input:
        assets=plan.assets,
        phi=plan.main_phi,
        prompts=plan.prompts_of_packs,
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
        spec=plan.capture_spec,
    message:
        "Measuring every head of {wildcards.backbone} on {wildcards.corpus} at {wildcards.length}"
    shell:
        'python -m residual_mass capture --spec {params.spec:q} --assets "$(dirname {input.assets:q})"'
        " --phi {input.phi} --prompts {input.prompts} --heads {output.heads} --mass {output.mass}"
        " > {log} 2>&1"


rule kernels:
    input:
        assets=plan.assets,
        phi=plan.kernels_phi,
        prompts=plan.prompts_of_packs,
    output:
        paths.KERNELS,
    log:
        "logs/kernels/{backbone}_{corpus}_{length}.log",
    benchmark:
        "logs/kernels/{backbone}_{corpus}_{length}.tsv"
    conda:
        "../../environment.yml"
    threads: machine.half_of_the_cores
    resources:
        gpu=machine.gpus,
        mem_mb=machine.with_gpu(64000, 6000),
        runtime=machine.with_gpu(60, 30),
    params:
        spec=plan.kernels_spec,
    message:
        "Kernels of one head of {wildcards.backbone} on {wildcards.corpus} at {wildcards.length}"
    shell:
        'python -m residual_mass kernels --spec {params.spec:q} --assets "$(dirname {input.assets:q})"'
        " --phi {input.phi} --prompts {input.prompts} --out {output} > {log} 2>&1"


rule findings:
    input:
        heads=plan.captured_by(paths.HEADS),
        mass=plan.captured_by(paths.MASS),
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
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        spec=plan.findings_spec,
    message:
        "Means and claims out of the rows of {wildcards.backbone}"
    shell:
        "python -m residual_mass findings --spec {params.spec:q} --heads {input.heads} --mass {input.mass}"
        " --accounting {output.accounting} --claims {output.claims} > {log} 2>&1"


rule residual_errors:
    input:
        assets=plan.assets,
        phi=plan.residuals_phi,
    output:
        heads=paths.RESIDUAL_HEADS,
        errors=paths.RESIDUAL_ERRORS,
    log:
        "logs/residual_errors/{backbone}_{length}.log",
    benchmark:
        "logs/residual_errors/{backbone}_{length}.tsv"
    conda:
        "../../environment.yml"
    threads: machine.half_of_the_cores
    resources:
        gpu=machine.gpus,
        mem_mb=machine.with_gpu(64000, 6000),
        runtime=machine.with_gpu(240, 120),
    params:
        spec=plan.residual_errors_spec,
    message:
        "Comparing methods head by head with {wildcards.backbone} at {wildcards.length}"
    shell:
        'python -m residual_mass residual-errors --spec {params.spec:q} --assets "$(dirname {input.assets:q})"'
        " --phi {input.phi} --heads {output.heads} --out {output.errors} > {log} 2>&1"
