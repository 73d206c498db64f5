"""Targets without output files of rules: they print facts about a study, describe its results, or fetch its data.
estimate and prefetch read its jobs from a file in logs/, written when the run starts. prefetch fills the assets folder;
an interrupted prefetch resumes there.
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
        '"$PYTHON" -m residual_mass {params.stage} {params.flags} 2>&1 | tee {log}'


use rule estimate as verify with:
    log:
        "logs/verify.log",
    params:
        stage="verify",
        flags="",


use rule estimate as crate with:
    log:
        "logs/crate.log",
    params:
        stage="crate",
        flags="--out ro-crate-metadata.json",


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
