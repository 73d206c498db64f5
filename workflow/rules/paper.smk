"""Tables and figures of the paper.

Needs: result tables, diagnostics, training logs, feature maps.
Makes: paper_tables/{study}/{label}.tex and .csv, paper_tables/{study}/figures/{label}.pdf and .png,
paper_tables/published/{label}.tex, paper_tables/{study}/comparison.csv and comparison_picture.csv,
paper_tables/{study}/main.tex and, where LaTeX is installed, main.pdf
"""


rule table:
    input:
        results=results_of,
        template=here("paper_tables/templates/{label}.tex.j2"),
        frame=here("paper_tables/templates/frame.tex.j2"),
    output:
        tex=TABLE,
        cells=CELLS,
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
        " --template {input.template:q} --out {output.tex} --cells {output.cells} > {log} 2>&1"


rule published_table:
    input:
        facts=facts_of,  # not named to the stage, which has them built in
        template=published_template,
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
        cells=cells_of,
    output:
        cells=COMPARISON,
        picture=PICTURE,
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
        "python -m residual_mass comparison --spec {params.spec:q} --cells {input.cells}"
        " --out {output.cells} --picture {output.picture} > {log} 2>&1"


rule figure:
    input:
        data=figure_data,
        audits=figure_audits,  # not read: rows that fail theirs become no figure
    output:
        pdf=f"{FIGURE}.pdf",
        png=f"{FIGURE}.png",
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
        " --template {input.template:q} --out {output} > {log} 2>&1"


rule document_pdf:
    input:
        document=DOCUMENT,
        tables=tables_of,  # the document reads them and the figures itself
        figures=figures_shown,
    output:
        DOCUMENT_PDF,
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
