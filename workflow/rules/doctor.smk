"""What this machine can run and what it lacks, for every study; prints, and makes no file.

Needs: nothing.
Makes: a report on the terminal
"""


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
        spec=DOCTOR_SPEC,  # written when a run starts that has this job
        assets=str(ASSETS.parent),
    message:
        "Looking at what this machine can run"
    shell:
        "python -m residual_mass doctor --spec-file {params.spec} --assets {params.assets:q} 2>&1 | tee {log}"
