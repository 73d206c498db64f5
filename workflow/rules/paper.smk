"""Tables and figures of the paper.

Needs: result tables, diagnostics, training logs, feature maps.
Makes: paper_tables/{study}/{label}.tex and .csv, paper_tables/{study}/figures/{label}.pdf and .png,
paper_tables/published/{label}.tex, paper_tables/{study}/comparison.csv and comparison_picture.csv,
paper_tables/{study}/numbers.tex, paper_tables/{study}/main.tex and, where LaTeX is installed, main.pdf
"""


rule table:
    input:
        results=plan.table_results,
        template=plan.template,
        frame=plan.here("paper_tables/templates/frame.tex.j2"),
    output:
        tex=report(
            paths.TABLE,
            caption="../report/table.rst",
            category="Tables",
            subcategory="{study}",
            labels={"table": "{label}", "file": "LaTeX"},
        ),
        cells=report(
            paths.CELLS,
            caption="../report/table.rst",
            category="Tables",
            subcategory="{study}",
            labels={"table": "{label}", "file": "cells"},
        ),
    log:
        "logs/table/{study}_{label}.log",
    benchmark:
        "logs/table/{study}_{label}.tsv"
    priority: 40
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        spec=plan.table_spec,
    message:
        "Table {wildcards.label} of study {wildcards.study}"
    shell:
        "python -m residual_mass table --spec {params.spec:q} --results {input.results}"
        " --template {input.template:q} --out {output.tex} --cells {output.cells} > {log} 2>&1"


rule published_table:
    input:
        facts=plan.published_values,  # not named to the stage, which has them built in
        template=plan.template,
        frame=plan.here("paper_tables/templates/frame.tex.j2"),
    output:
        paths.PUBLISHED_TABLE,
    log:
        "logs/published_table/{label}.log",
    benchmark:
        "logs/published_table/{label}.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    message:
        "Table {wildcards.label} with the paper's values"
    shell:
        "python -m residual_mass published --label {wildcards.label}"
        " --template {input.template:q} --out {output} > {log} 2>&1"


rule comparison:
    input:
        tables=plan.compared_tables,
    output:
        cells=report(
            paths.COMPARISON,
            caption="../report/comparison.rst",
            category="Beside the paper",
            subcategory="{study}",
            labels={"compares": "every cell"},
        ),
        picture=report(
            paths.PICTURE,
            caption="../report/comparison.rst",
            category="Beside the paper",
            subcategory="{study}",
            labels={"compares": "whole tables"},
        ),
    log:
        "logs/comparison/{study}.log",
    benchmark:
        "logs/comparison/{study}.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        spec=plan.comparison_spec,
    message:
        "Study {wildcards.study} beside the paper's values"
    shell:
        "python -m residual_mass comparison --spec {params.spec:q} --tables {input.tables}"
        " --out {output.cells} --picture {output.picture} > {log} 2>&1"


rule numbers:
    input:
        tables=plan.all_tables,
        template=plan.here("paper_tables/templates/numbers.tex.j2"),
    output:
        paths.NUMBERS,
    log:
        "logs/numbers/{study}.log",
    benchmark:
        "logs/numbers/{study}.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        spec=plan.numbers_spec,
    message:
        "Numbers of study {wildcards.study} for prose"
    shell:
        "python -m residual_mass numbers --spec {params.spec:q} --tables {input.tables}"
        " --template {input.template:q} --out {output} > {log} 2>&1"


rule figure:
    input:
        data=plan.figure_data,
    output:
        pdf=paths.FIGURE_PDF,
        png=report(
            paths.FIGURE_PNG,
            caption="../report/figure.rst",
            category="Figures",
            subcategory="{study}",
            labels={"figure": "{label}"},
        ),
    log:
        "logs/figure/{study}_{label}.log",
    benchmark:
        "logs/figure/{study}_{label}.tsv"
    priority: 40
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=plan.figure_spec,
    message:
        "Figure {wildcards.label} of study {wildcards.study}"
    shell:
        "python -m residual_mass figure --spec {params.spec:q} --data {input.data}"
        " --pdf {output.pdf} --png {output.png} > {log} 2>&1"


rule document:
    input:
        tables=plan.document_tables,
        figures=plan.document_figures,
        numbers=plan.document_numbers,
        template=plan.here("paper_tables/templates/main.tex.j2"),
    output:
        paths.DOCUMENT,
    log:
        "logs/document/{study}.log",
    benchmark:
        "logs/document/{study}.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        spec=plan.document_spec,
    message:
        "All tables and figures of study {wildcards.study}"
    shell:
        "python -m residual_mass document --spec {params.spec:q} --tables {input.tables} --figures {input.figures}"
        " --numbers {input.numbers} --template {input.template:q} --out {output} > {log} 2>&1"


rule document_pdf:
    input:
        document=paths.DOCUMENT,
        tables=plan.document_tables,  # the document reads them, the figures and the numbers itself
        figures=plan.document_figures,
        numbers=plan.document_numbers,
    output:
        report(
            paths.DOCUMENT_PDF,
            caption="../report/document.rst",
            category="Document",
            labels={"study": "{study}"},
        ),
    log:
        "logs/document_pdf/{study}.log",
    benchmark:
        "logs/document_pdf/{study}.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    message:
        "PDF of all tables and figures of study {wildcards.study}"
    shell:
        "python -m residual_mass pdf --document {input.document} --out {output} > {log} 2>&1"
