"""Tables and figures of the paper.

Needs: result tables, diagnostics, training logs, feature maps.
Makes: paper_tables/{study}/{label}.tex, .csv and .json, paper_tables/{study}/figures/{label}.pdf and .png,
paper_tables/published/{label}.tex, paper_tables/{study}/comparison.csv and comparison_picture.csv,
paper_tables/{study}/numbers.tex, paper_tables/{study}/main.tex and, where LaTeX is installed, main.pdf
"""


rule table:
    input:
        results=results_of,
        template=template_of,
        frame=here("paper_tables/templates/frame.tex.j2"),
    output:
        tex=report(
            TABLE,
            caption="../report/table.rst",
            category="Tables",
            subcategory="{study}",
            labels={"table": "{label}", "file": "LaTeX"},
        ),
        cells=report(
            CELLS,
            caption="../report/table.rst",
            category="Tables",
            subcategory="{study}",
            labels={"table": "{label}", "file": "cells"},
        ),
        data=TABLE_DATA,
    log:
        "logs/table/{study}_{label}.log",
    benchmark:
        "logs/table/{study}_{label}.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        spec=table_spec,
    message:
        "Table {wildcards.label} of study {wildcards.study}"
    shell:
        "python -m residual_mass table --spec {params.spec:q} --results {input.results}"
        " --template {input.template:q} --out {output.tex} --cells {output.cells} --data {output.data} > {log} 2>&1"


rule published_table:
    input:
        facts=facts_of,  # not named to the stage, which has them built in
        template=template_of,
        frame=here("paper_tables/templates/frame.tex.j2"),
    output:
        PUBLISHED_TABLE,
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
        tables=data_of(cells_of),
    output:
        cells=report(
            COMPARISON,
            caption="../report/comparison.rst",
            category="Beside the paper",
            subcategory="{study}",
            labels={"compares": "every cell"},
        ),
        picture=report(
            PICTURE,
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
        spec=comparison_spec,
    message:
        "Study {wildcards.study} beside the paper's values"
    shell:
        "python -m residual_mass comparison --spec {params.spec:q} --tables {input.tables}"
        " --out {output.cells} --picture {output.picture} > {log} 2>&1"


rule numbers:
    input:
        tables=data_of(numbers_cells),
        template=here("paper_tables/templates/numbers.tex.j2"),
    output:
        NUMBERS,
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
        spec=numbers_spec,
    message:
        "Numbers of study {wildcards.study} for prose"
    shell:
        "python -m residual_mass numbers --spec {params.spec:q} --tables {input.tables}"
        " --template {input.template:q} --out {output} > {log} 2>&1"


rule figure:
    input:
        data=figure_data,
        audits=figure_audits,  # not read: rows that fail theirs become no figure
    output:
        pdf=f"{FIGURE}.pdf",
        png=report(
            f"{FIGURE}.png",
            caption="../report/figure.rst",
            category="Figures",
            subcategory="{study}",
            labels={"figure": "{label}"},
        ),
    log:
        "logs/figure/{study}_{label}.log",
    benchmark:
        "logs/figure/{study}_{label}.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=figure_spec,
    message:
        "Figure {wildcards.label} of study {wildcards.study}"
    shell:
        "python -m residual_mass figure --spec {params.spec:q} --data {input.data}"
        " --pdf {output.pdf} --png {output.png} > {log} 2>&1"


rule document:
    input:
        tables=tables_of,
        figures=figures_shown,
        numbers=numbers_shown,
        template=here("paper_tables/templates/main.tex.j2"),
    output:
        DOCUMENT,
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
        spec=document_spec,
    message:
        "All tables and figures of study {wildcards.study}"
    shell:
        "python -m residual_mass document --spec {params.spec:q} --tables {input.tables} --figures {input.figures}"
        " --numbers {input.numbers} --template {input.template:q} --out {output} > {log} 2>&1"


rule document_pdf:
    input:
        document=DOCUMENT,
        tables=tables_of,  # the document reads them, the figures and the numbers itself
        figures=figures_shown,
        numbers=numbers_shown,
    output:
        report(
            DOCUMENT_PDF,
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
