"""Targets that look at a study and print, or fetch what it reads.

Needs: nothing; prefetch needs the hub, and a package index for the assets (with offline neither, and it only checks).
Makes: no declared file. What they look at is written to logs/ when the run starts; prefetch fills the assets folder,
where an interrupted job resumes.
"""


rule estimate:
    # From the rates that finished train and generate jobs measured.
    log:
        "logs/estimate.log",
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        jobs=paths.JOBS.format(target="estimate"),
    message:
        "Estimating the cost of the study"
    shell:
        "python -m residual_mass estimate --jobs {params.jobs} --results results 2>&1 | tee {log}"


rule doctor:
    log:
        "logs/doctor.log",
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        jobs=paths.JOBS.format(target="doctor"),
        assets=str(plan.assets_folder),
    message:
        "Looking at what this machine lacks"
    shell:
        "python -m residual_mass doctor --jobs {params.jobs} --assets {params.assets:q} --results results 2>&1 | tee {log}"


rule verify:
    log:
        "logs/verify.log",
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=60,
    message:
        "Comparing results with their records"
    shell:
        "python -m residual_mass verify 2>&1 | tee {log}"


rule prefetch:
    input:
        assets=plan.assets_manifest,
    log:
        "logs/prefetch.log",
    localrule: True
    conda:
        "../../environment.yml"
    threads: 2
    resources:
        mem_mb=4000,
        runtime=2880,
    params:
        jobs=paths.JOBS.format(target="prefetch"),
    message:
        "Fetching what the study reads of the hub"
    shell:
        'python -m residual_mass prefetch --jobs {params.jobs} --assets "$(dirname {input.assets:q})" 2>&1 | tee {log}'
