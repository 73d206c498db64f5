"""Everything that the study reads of the hub, in the assets folder; with offline, a check that it is there.

Needs: the hub, and a package index for the assets; with offline nothing.
Makes: hub.json and hub/ in the assets folder, which are declared nowhere: an interrupted job goes on with what it has
"""


rule prefetch:
    input:
        assets=str(ASSETS),
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
        spec=lambda wildcards: study_needs(config["study"]),
    message:
        "Fetching what the study reads of the hub"
    shell:
        'python -m residual_mass prefetch --spec {params.spec:q} --assets "$(dirname {input.assets:q})" 2>&1 | tee {log}'
