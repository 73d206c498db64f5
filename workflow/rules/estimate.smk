"""Cost of the study that config.yaml names, from the rates that finished jobs measured; prints, and makes no file.

Needs: nothing; finished train and generate jobs give it their rates.
Makes: a table on the terminal
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
        spec=lambda wildcards: estimate_spec(config["study"]),
    message:
        "Estimating the cost of the study"
    shell:
        "python -m residual_mass estimate --spec {params.spec:q} --results results 2>&1 | tee {log}"
