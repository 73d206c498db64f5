"""All results of the study that config.yaml names on one page, complete in itself.

Needs: its tables, figures, comparison and claims, and for their hashes what these were made of: prompts, feature maps,
training logs, generated texts, results and captured files.
Makes: results/report.html
"""


rule report:
    input:
        tables=reported(TABLE_DATA),
        figures=figures_reported,
        comparison=reported(COMPARISON, compared=True),
        picture=reported(PICTURE, compared=True),
        claims=claims_reported,
        sources=sources_reported,
        deviations=here("docs/deviations.md"),
        template=here("paper_tables/templates/report.html.j2"),
    output:
        REPORT,
    log:
        "logs/report.log",
    benchmark:
        "logs/report.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        spec=report_spec,
    message:
        "Page of the study"
    shell:
        "python -m residual_mass report --spec {params.spec:q} --tables {input.tables}"
        " --figures {input.figures} --comparison {input.comparison} --picture {input.picture}"
        " --claims {input.claims} --sources {input.sources} --deviations {input.deviations:q}"
        " --template {input.template:q} --out {output} > {log} 2>&1"
