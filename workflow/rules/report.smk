"""All results of the study that config.yaml names on one page, complete in itself.

Needs: its tables, figures and comparison.
Makes: results/report.html
"""


rule report:
    input:
        tables=lambda _: plan.of_page(paths.CELLS),
        figures=lambda _: plan.page_figures(),
        comparison=lambda _: plan.of_page(paths.COMPARISON, compared=True),
        template=plan.here("paper_tables/templates/report.html.j2"),
    output:
        paths.REPORT,
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
        spec=plan.report_spec,
    message:
        "Page of the study"
    shell:
        "python -m residual_mass report --spec {params.spec:q} --tables {input.tables}"
        " --figures {input.figures} --comparison {input.comparison}"
        " --template {input.template:q} --out {output} > {log} 2>&1"
