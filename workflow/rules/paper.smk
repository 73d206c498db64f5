"""Tables and figures of the paper, and the page of the study that config.yaml names.

Needs: result tables, diagnostics, training logs, feature maps.
Makes: paper_tables/{study}/{label}.tex and .csv, paper_tables/{study}/figures/{label}.pdf and .png,
paper_tables/published/{label}.tex, paper_tables/{study}/comparison.csv and comparison_picture.csv,
paper_tables/{study}/numbers.tex, paper_tables/{study}/main.tex, results/report.html and, where LaTeX is installed,
main.pdf
"""


use rule score as table with:
    input:
        plan.here(paths.TEMPLATE.format(name="frame")),
        unpack(plan.inputs("table")),
    output:
        out=report(
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
    params:
        stage="table",
        spec=plan.spec("table"),
        files=flags,
    message:
        "Table {wildcards.label} of study {wildcards.study}"


rule published_table:
    input:
        plan.here(paths.TEMPLATE.format(name="frame")),
        plan.here(paths.PUBLISHED_VALUES),  # not named to the stage, which has them built in
        unpack(plan.inputs("published_table")),
    output:
        out=paths.PUBLISHED_TABLE,
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
    params:
        files=flags,
    message:
        "Table {wildcards.label} with the paper's values"
    shell:
        "python -m residual_mass published --label {wildcards.label} {params.files} > {log} 2>&1"


use rule score as comparison with:
    input:
        unpack(plan.inputs("comparison")),
    output:
        out=report(
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
    priority: 0
    params:
        stage="comparison",
        spec=plan.spec("comparison"),
        files=flags,
    message:
        "Study {wildcards.study} beside the paper's values"


use rule score as numbers with:
    input:
        unpack(plan.inputs("numbers")),
    output:
        out=paths.NUMBERS,
    log:
        "logs/numbers/{study}.log",
    benchmark:
        "logs/numbers/{study}.tsv"
    priority: 0
    params:
        stage="numbers",
        spec=plan.spec("numbers"),
        files=flags,
    message:
        "Numbers of study {wildcards.study} for prose"


use rule score as figure with:
    input:
        unpack(plan.inputs("figure")),
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
    params:
        stage="figure",
        spec=plan.spec("figure"),
        files=flags,
    message:
        "Figure {wildcards.label} of study {wildcards.study}"


use rule score as document with:
    input:
        unpack(plan.inputs("document")),
    output:
        out=paths.DOCUMENT,
    log:
        "logs/document/{study}.log",
    benchmark:
        "logs/document/{study}.tsv"
    priority: 0
    params:
        stage="document",
        spec=plan.spec("document"),
        files=flags,
    message:
        "All tables and figures of study {wildcards.study}"


rule document_pdf:
    input:
        unpack(plan.inputs("document_pdf")),
        document=paths.DOCUMENT,
    output:
        out=report(
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
        "python -m residual_mass pdf --document {input.document} --out {output.out} > {log} 2>&1"


use rule score as report with:
    input:
        unpack(plan.inputs("report")),
    output:
        out=paths.REPORT,
    log:
        "logs/report.log",
    benchmark:
        "logs/report.tsv"
    priority: 0
    params:
        stage="report",
        spec=plan.spec("report"),
        files=flags,
    message:
        "Page of the study"
