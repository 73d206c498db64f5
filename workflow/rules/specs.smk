"""The files of a job, and the spec that it is told, from its wildcards alone; no rules."""

PHI = "results/phi/{backbone}_{maps}.safetensors"
TRAINING_LOG = "results/training_{backbone}_{maps}.csv"
PROMPTS = "results/prompts/{benchmark}_{tokenizer}_{length}/manifest.json"
VARIANTS = expand("results/phi/{{backbone}}_{{maps}}-{variant}.safetensors", variant=sorted(config["variants"]))
RECIPE_PHI = "results/recipes/{recipe}_{backbone}_{maps}_{seed}.safetensors"
RECIPE_LOG = "results/recipes/{recipe}_{backbone}_{maps}_{seed}.csv"
RECIPES_LOG = "results/recipes_{backbone}_{maps}.csv"
GENERATIONS = "results/generations/{benchmark}_{backbone}_{length}_{group}/{tasks}.jsonl"
RESULTS = "results/{benchmark}_{backbone}_{length}.csv"
COMPARED = "results/compared/{comparison}/{benchmark}_{backbone}_{length}.csv"
MISMATCH = "results/cross_length_mismatch_{backbone}.csv"
ABLATION = "results/ablation_{ablation}_{backbone}.csv"
MAP_ERRORS = "results/diagnostics/map_errors_{backbone}_{length}.csv"
HEADS = "results/diagnostics/heads_{backbone}_{corpus}_{length}.parquet"
MASS = "results/diagnostics/mass_{backbone}_{corpus}_{length}.parquet"
ROWS = "results/diagnostics/rows_{backbone}_{corpus}_{length}.safetensors"
AUDIT = "results/diagnostics/audit_{backbone}_{corpus}_{length}.csv"
KERNELS = "results/diagnostics/kernels_{backbone}_{corpus}_{length}.parquet"
ACCOUNTING = "results/diagnostics/accounting_{backbone}.csv"
STATE_DTYPE = "results/diagnostics/state_dtype_{backbone}.csv"
CLAIMS = "results/diagnostics/claims_{backbone}.csv"
RUNTIME = "results/runtime_{backbone}.csv"
TABLE = "paper_tables/{study}/{label}.tex"
CELLS = "paper_tables/{study}/{label}.csv"
TABLE_DATA = "paper_tables/{study}/{label}.json"
PUBLISHED_TABLE = f"paper_tables/{PUBLISHED}/{{label}}.tex"
COMPARISON = "paper_tables/{study}/comparison.csv"
PICTURE = "paper_tables/{study}/comparison_picture.csv"
NUMBERS = "paper_tables/{study}/numbers.tex"
FIGURE = "paper_tables/{study}/figures/{label}"
DOCUMENT = "paper_tables/{study}/main.tex"
DOCUMENT_PDF = "paper_tables/{study}/main.pdf"
REPORT = "results/report.html"
"""Of the study that is named in the configuration."""

ABLATION_TABLES = {"dphi_ablation": "dphi", "loss_ablation": "loss"}
ONE_BUDGET = ("kernel_sanity", "logz_calibration", "fullsub_nosub_delta", "entropy_heatmap", "fixedk_breakdown")
"""What the labels of the figures that show one budget begin with; no other figure depends on that budget."""


def spec(cls: type, **fields: Any) -> str:
    """The JSON that the stage will parse, parsed once already so that a slip ends the run here."""
    try:
        return to_json(parse_spec(cls, json.dumps(fields)))
    except ValueError as error:
        sys.exit(f"{cls.__name__}: {error}")


def protocol(wildcards: Any) -> dict[str, Any]:
    """What the specs of every backbone's jobs share."""
    backbone = backbone_of(wildcards)
    return {"study": backbone.study, "backbone": dataclasses.asdict(backbone)}


def maps_of(labels: list[str]) -> list[dict[str, Any]]:
    """The labels, each with the length that its maps were trained at, in tokens."""
    return [{"label": label, "length": tokens_of(length_and_variant(label)[0])} for label in labels]


def group_maps(study: dict[str, Any], group: str) -> list[str]:
    """Labels of the maps that a group of arms uses; what the main group decodes is not decoded again."""
    main, length = study["maps"]["main"], study["ablations"]["length"]
    if group == "main":
        return [main]
    variants = [maps_label(length, variant) for variant in sorted(config["variants"])]
    labels = study["mismatch"]["maps"] if group == "mismatch" else [length, *variants]
    return [label for label in labels if label != main]


def group_arms(study: dict[str, Any], group: str) -> list[dict[str, Any]]:
    """What is decoded together: every method at every budget, or one method at one budget under different maps."""
    labels = group_maps(study, group)
    if group != "main":
        budget = study["mismatch" if group == "mismatch" else "ablations"]["budget"]
        return [{"method": "topk_phi", "budget_percent": budget, "maps": label} for label in labels]
    budgets = {method: study["budgets"] if method != "full" else [None] for method in study["methods"]}
    (main,) = labels
    return [
        {
            "method": method,
            "budget_percent": budget,
            "maps": main if estimators.estimator_named(method).adds_residual else None,
        }
        for method in budgets
        for budget in budgets[method]
    ]


def compared_maps(study: dict[str, Any], comparison: str) -> list[str]:
    """Labels of the maps that a comparison is about, in the order of its table's rows."""
    if comparison == "mismatch":
        return study["mismatch"]["maps"]
    length = study["ablations"]["length"]
    return [maps_label(length, "" if row == "ours" else row) for row in config["ablations"][comparison]]


def compared_arms(study: dict[str, Any], comparison: str) -> list[dict[str, Any]]:
    budget = study["mismatch" if comparison == "mismatch" else "ablations"]["budget"]
    baselines = [{"method": "full", "budget_percent": None}, {"method": "topk", "budget_percent": budget}]
    labels = compared_maps(study, comparison)
    return baselines + [{"method": "topk_phi", "budget_percent": budget, "maps": label} for label in labels]


def examples_of(settings: dict[str, Any]) -> int:
    return config["examples"] or settings["examples"]


def prompts_spec(wildcards: Any) -> str:
    owner = tokenizer_owner(wildcards.tokenizer)
    settings = STUDIES[owner.study]["benchmarks"][wildcards.benchmark]
    return spec(
        PromptsSpec,
        benchmark=wildcards.benchmark,
        length=wildcards.length,
        tokenizer=wildcards.tokenizer,
        model_id=owner.model_id,
        revision=owner.revision,
        tokenizer_source="hub" if owner.source == "hub" else "assets",
        data_source=settings["data_source"],
        examples=examples_of(settings),
        seed=settings["seed"],
        recipe=RECIPES["prompts"],
    )


def train_spec(wildcards: Any) -> str:
    """The study's own recipe."""
    return training(wildcards, "study", study_of(wildcards)["phi"], {"ours": {}})


def train_variants_spec(wildcards: Any) -> str:
    return training(wildcards, "study", study_of(wildcards)["phi"], config["variants"])


def train_recipe_spec(wildcards: Any) -> str:
    """A named recipe under one seed."""
    phi = recipe_phi(wildcards) | {"seed": int(wildcards.seed)}
    return training(wildcards, wildcards.recipe, phi, {wildcards.recipe: {}})


def recipe_phi(wildcards: Any) -> dict[str, Any]:
    """How a job trains: as its study says, with what the recipe changes where it is of one."""
    study = study_of(wildcards)
    recipe = wildcards.get("recipe")
    return changed_phi(study, config["recipes"][recipe] if recipe else {})


def training(wildcards: Any, name: str, phi: dict[str, Any], variants: dict[str, dict[str, Any]]) -> str:
    """The spec of one training job.

    Args:
        phi: how it trains; its GPUs are a resource of the job and no part of the spec.
        variants: what each of the maps changes of the map and the objective, by label.
    """
    apart = ("map", "objective", "gpus")
    return spec(
        TrainSpec,
        name=name,
        backbone=protocol(wildcards)["backbone"],
        length=wildcards.maps,
        variants=[
            {"label": label} | {key: phi[key] | changes.get(key, {}) for key in ("map", "objective")}
            for label, changes in sorted(variants.items())
        ],
        anchors=study_of(wildcards)["anchors"],
        recipe=RECIPES["train"],
        **{key: value for key, value in phi.items() if key not in apart},
    )


def generate_spec(wildcards: Any) -> str:
    study = study_of(wildcards)
    settings = study["benchmarks"][wildcards.benchmark]
    every_task = tasks_of(wildcards.benchmark, tokens_of(wildcards.length))
    return spec(
        GenerateSpec,
        **protocol(wildcards),
        benchmark=wildcards.benchmark,
        length=wildcards.length,
        tasks=list(every_task) if wildcards.tasks == "all" else [wildcards.tasks],
        examples=examples_of(settings),
        arms=group_arms(study, wildcards.group),
        anchors=study["anchors"],
        truncate_to=study["truncate_to"],
        maps=maps_of(group_maps(study, wildcards.group)),
        allow_extrapolation=wildcards.group == "mismatch",  # what it shows; refused everywhere else
        recipe=RECIPES["generate"],
        **{
            key: settings[key]
            for key in ("chat_template", "budget_length", "answer_margin", "stop_when_saturated", "batch_tokens")
        },
    )


def score_spec(wildcards: Any) -> str:
    study = study_of(wildcards)
    compared = wildcards.get("comparison")
    return spec(
        ScoreSpec,
        **protocol(wildcards),
        benchmark=wildcards.benchmark,
        length=wildcards.length,
        data_source=study["benchmarks"][wildcards.benchmark]["data_source"],
        arms=compared_arms(study, compared) if compared else None,
        decoding=decoding_of(study, wildcards.benchmark),
        recipe=RECIPES["score"],
        **study["score"],
    )


def decoding_of(study: dict[str, Any], benchmark: str) -> str:
    names = ("chat_template", "answer_margin", "stop_when_saturated", "budget_length")
    settings = {name: study["benchmarks"][benchmark][name] for name in names}
    return decoding_words(**settings, truncate_to=study["truncate_to"])


def capture_spec(wildcards: Any) -> str:
    study = study_of(wildcards)
    captured = study["diagnostics"]
    return spec(
        CaptureSpec,
        **protocol(wildcards),
        corpus=wildcards.corpus,
        length=wildcards.length,
        budgets=study["budgets"],
        anchors=study["anchors"],
        maps=maps_of([study["maps"]["main"]])[0],
        recipe=RECIPES["capture"],
        **{key: captured[key] for key in ("packs", "queries", "audited", "seed")},
    )


def audit_spec(wildcards: Any) -> str:
    return spec(
        AuditSpec,
        anchors=study_of(wildcards)["anchors"],
        error_tolerance=1e-5,
        log_mass_tolerance=1e-4,
        recipe=RECIPES["audit"],
    )


def kernels_spec(wildcards: Any) -> str:
    study = study_of(wildcards)
    captured = study["diagnostics"]
    return spec(
        KernelsSpec,
        **protocol(wildcards),
        corpus=wildcards.corpus,
        length=wildcards.length,
        budget_percent=captured["budget"],
        anchors=study["anchors"],
        maps=maps_of(kernel_maps(wildcards)),
        recipe=RECIPES["kernels"],
        **captured["head"],
        **{key: captured[key] for key in ("queries", "seed")},
    )


def kernel_maps(wildcards: Any) -> list[str]:
    """Labels of the maps whose kernels are shown: the main ones, and where the ablations are made those of theirs."""
    study = study_of(wildcards)
    main, ablations = study["maps"]["main"], study["ablations"]
    ablated = wildcards.backbone in ablations["backbones"] and wildcards.length == ablations["length"]
    return [main, *group_maps(study, "ablation")] if ablated else [main]


def findings_spec(wildcards: Any) -> str:
    study = study_of(wildcards)
    captured = study["diagnostics"]
    return spec(
        FindingsSpec,
        study=backbone_of(wildcards).study,
        budget_percent=captured["budget"],
        corpus=captured["corpora"][0],
        length=max(captured["lengths"], key=tokens_of),
        recipe=RECIPES["findings"],
        **study["score"],
    )


def map_errors_spec(wildcards: Any) -> str:
    study = study_of(wildcards)
    captured = study["diagnostics"]
    return spec(
        MapErrorsSpec,
        backbone=protocol(wildcards)["backbone"],
        corpus=captured["corpora"][0],
        length=wildcards.length,
        budgets=study["budgets"],
        anchors=study["anchors"],
        maps=maps_of(maps_at(wildcards)),
        recipe=RECIPES["map_errors"],
        **{key: captured[key] for key in ("packs", "queries", "seed")},
    )


def maps_at(wildcards: Any) -> list[str]:
    """Labels of all maps that a study evaluates for a backbone at a length."""
    study = study_of(wildcards)
    mismatch, ablations = study["mismatch"], study["ablations"]
    labels = [*(mismatch["maps"] if wildcards.backbone in mismatch["backbones"] else []), study["maps"]["main"]]
    if wildcards.backbone in ablations["backbones"] and wildcards.length == ablations["length"]:
        labels += [wildcards.length, *group_maps(study, "ablation")]
    return list(dict.fromkeys(labels))


def runtime_spec(wildcards: Any) -> str:
    study = study_of(wildcards)
    return spec(
        RuntimeSpec,
        **protocol(wildcards),
        anchors=study["anchors"],
        map=study["phi"]["map"],
        recipe=RECIPES["runtime"],
        **study["runtime"],
    )
