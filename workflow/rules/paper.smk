"""Tables and figures of the paper, and the page of the study that config.yaml names."""


use rule score as table with:
    input:
        plan.here(paths.TEMPLATE.format(name="frame")),
        unpack(plan.inputs("table")),
    output:
        out=reported(paths.TABLE, "Tables", "table", "{study}", table="{label}", file="LaTeX"),
        cells=reported(paths.CELLS, "Tables", "table", "{study}", table="{label}", file="cells"),
    log:
        "logs/table/{study}_{label}.log",
    benchmark:
        "logs/table/{study}_{label}.tsv"
    params:
        stage="table",
        spec=plan.spec("table"),


use rule mismatch as published_table with:
    input:
        plan.here(paths.TEMPLATE.format(name="frame")),
        plan.here(paths.PUBLISHED_VALUES),  # the stage has no flag for them: it finds them in the package
        unpack(plan.inputs("published_table")),
    output:
        out=paths.PUBLISHED_TABLE,
    log:
        "logs/published_table/{label}.log",
    benchmark:
        "logs/published_table/{label}.tsv"
    params:
        stage="published --label {label}",


use rule score as comparison with:
    input:
        unpack(plan.inputs("comparison")),
    output:
        out=reported(paths.COMPARISON, "Comparison with the paper", "comparison", "{study}"),
    log:
        "logs/comparison/{study}.log",
    benchmark:
        "logs/comparison/{study}.tsv"
    params:
        stage="comparison",
        spec=plan.spec("comparison"),


use rule score as numbers with:
    input:
        unpack(plan.inputs("numbers")),
    output:
        out=paths.NUMBERS,
    log:
        "logs/numbers/{study}.log",
    benchmark:
        "logs/numbers/{study}.tsv"
    params:
        stage="numbers",
        spec=plan.spec("numbers"),


use rule score as figure with:
    input:
        unpack(plan.inputs("figure")),
    output:
        pdf=paths.FIGURE_PDF,
        png=reported(paths.FIGURE_PNG, "Figures", "figure", "{study}", figure="{label}"),
    log:
        "logs/figure/{study}_{label}.log",
    benchmark:
        "logs/figure/{study}_{label}.tsv"
    params:
        stage="figure",
        spec=plan.spec("figure"),


use rule score as document with:
    input:
        unpack(plan.inputs("document")),
    output:
        out=paths.DOCUMENT,
    log:
        "logs/document/{study}.log",
    benchmark:
        "logs/document/{study}.tsv"
    params:
        stage="document",
        spec=plan.spec("document"),


use rule mismatch as document_pdf with:
    input:
        document=paths.DOCUMENT,
    output:
        out=reported(paths.DOCUMENT_PDF, "Document", "document", study="{study}"),
    log:
        "logs/document_pdf/{study}.log",
    benchmark:
        "logs/document_pdf/{study}.tsv"
    params:
        stage="pdf",


use rule score as report with:
    input:
        unpack(plan.inputs("report")),
    output:
        out=paths.REPORT,
    log:
        "logs/report.log",
    benchmark:
        "logs/report.tsv"
    params:
        stage="report",
        spec=plan.spec("report"),
