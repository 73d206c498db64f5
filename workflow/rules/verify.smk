"""Whether results are what their records say, and belong to this code and configuration; prints, and makes no file.

Needs: nothing; looks at what lies in results, of every study.
Makes: a line per result on the terminal; fails unless all are ok
"""


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
    params:
        expected=EXPECTED,  # written when a run starts that has this job
    message:
        "Comparing results with their records"
    shell:
        "python -m residual_mass verify --expected {params.expected} 2>&1 | tee {log}"
