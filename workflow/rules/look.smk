"""Targets that look at a study and print, or fetch what it reads: no declared file. What they look at is written to
logs/ when the run starts; prefetch fills the assets folder, where an interrupted job resumes.
"""


rule estimate:
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
        stage="estimate",
        flags=f"--jobs {paths.JOBS.format(target='estimate')} --results results",
    message:
        "{rule}"
    shell:
        "python -m residual_mass {params.stage} {params.flags} 2>&1 | tee {log}"


use rule estimate as verify with:
    log:
        "logs/verify.log",
    params:
        stage="verify",
        flags="",


use rule estimate as prefetch with:
    input:
        plan.assets_manifest,
    log:
        "logs/prefetch.log",
    threads: 2
    resources:
        mem_mb=4000,
        runtime=2880,
    params:
        stage="prefetch",
        flags=f"--jobs {paths.JOBS.format(target='prefetch')} --assets {ASSETS}",
