"""What a job gets, from its wildcards alone: specs, inputs and resources; no rules."""

PHI = "results/phi/{backbone}_{maps}.safetensors"
PROMPTS = "results/prompts/{benchmark}_{tokenizer}_{length}/manifest.json"
GENERATIONS = "results/generations/{benchmark}_{backbone}_{length}_{maps}/{tasks}.jsonl"
RESULTS = "results/{benchmark}_{backbone}_{length}.csv"
HEADS = "results/diagnostics/heads_{backbone}_{corpus}_{length}.parquet"
TABLE = "paper_tables/{study}/{label}.tex"
FIGURE = "paper_tables/{study}/figures/{label}"

# ---- specs -----------------------------------------------------------------------------------------------------------


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


def maps_of(label: str) -> dict[str, Any]:
    return {"label": label, "length": tokens_of(label)}


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
    study = study_of(wildcards)
    return spec(
        TrainSpec,
        backbone=protocol(wildcards)["backbone"],
        length=wildcards.maps,
        anchors=study["anchors"],
        recipe=RECIPES["train"],
        **study["phi"],
    )


def generate_spec(wildcards: Any) -> str:
    study = study_of(wildcards)
    settings = study["benchmarks"][wildcards.benchmark]
    every_task = tasks_of(wildcards.benchmark, tokens_of(wildcards.length))
    arms = {method: study["budgets"] if method != "full" else [None] for method in study["methods"]}
    return spec(
        GenerateSpec,
        **protocol(wildcards),
        benchmark=wildcards.benchmark,
        length=wildcards.length,
        tasks=list(every_task) if wildcards.tasks == "all" else [wildcards.tasks],
        examples=examples_of(settings),
        arms=[{"method": method, "budget_percent": budget} for method in arms for budget in arms[method]],
        anchors=study["anchors"],
        maps=maps_of(wildcards.maps),
        allow_extrapolation=False,
        recipe=RECIPES["generate"],
        **{key: settings[key] for key in ("budget_length", "answer_margin", "batch_examples")},
    )


def score_spec(wildcards: Any) -> str:
    return spec(
        ScoreSpec,
        **protocol(wildcards),
        benchmark=wildcards.benchmark,
        length=wildcards.length,
        recipe=RECIPES["score"],
        **study_of(wildcards)["score"],
    )


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
        maps=maps_of(study["maps"]["main"]),
        recipe=RECIPES["capture"],
        **{key: captured[key] for key in ("packs", "queries", "seed")},
    )


def table_spec(wildcards: Any) -> str:
    study, names = STUDIES[wildcards.study], backbones_of(wildcards.study)
    return spec(
        TableSpec,
        study=wildcards.study,
        label=wildcards.label,
        backbones=names,
        lengths=study["lengths"],
        budgets=study["budgets"],
        benchmarks=list(study["benchmarks"]),
        backbone_titles={name: config["backbones"][name]["title"] for name in names},
    )


# ---- inputs ----------------------------------------------------------------------------------------------------------

ON_A_BACKBONE: dict[str, set[Path]] = {}
"""By backbone, the outputs that need it and that this run's targets lead to."""


def backbones_to_run() -> list[BackboneSpec]:
    """The backbones for which something that needs them is missing."""
    return [BACKBONES[name] for name, outputs in ON_A_BACKBONE.items() if not all(map(Path.exists, outputs))]


def here(path: str) -> str:
    """A file of the repository as seen from the working directory, so that moving both together reruns nothing."""
    return os.path.relpath(ROOT / path)


def assets_for(output: str) -> Callable[[Any], str]:
    """The assets manifest as input of a job that needs its backbone to make `output`."""

    def assets(wildcards: Any) -> str:
        study_of(wildcards)
        ON_A_BACKBONE.setdefault(wildcards.backbone, set()).add(Path(output.format(**dict(wildcards.items()))))
        return str(ASSETS)

    return assets


def assets_for_prompts(wildcards: Any) -> str:
    labels = sorted({backbone.tokenizer for backbone in BACKBONES.values()})
    known("tokenizer", wildcards.tokenizer, labels, "config/config.yaml")
    name = tokenizer_owner(wildcards.tokenizer).study
    for kind, key in (("benchmark", "benchmarks"), ("length", "lengths")):
        known(kind, wildcards[kind], STUDIES[name][key], f"config/studies/{name}.yaml")
    return str(ASSETS)


def prompts_of(wildcards: Any) -> str:
    tokenizer = backbone_of(wildcards).tokenizer
    return PROMPTS.format(benchmark=wildcards.benchmark, tokenizer=tokenizer, length=wildcards.length)


def phi_of(wildcards: Any) -> str:
    """The maps that the job's name says, else the main ones."""
    main = study_of(wildcards)["maps"]["main"]
    return PHI.format(backbone=wildcards.backbone, maps=wildcards.get("maps", main))


def generations_of(wildcards: Any) -> list[str]:
    study = study_of(wildcards)
    tasks = task_files(study, wildcards.benchmark, wildcards.length)
    return expand(GENERATIONS, **dict(wildcards.items()), maps=study["maps"]["main"], tasks=tasks)


def results_of(wildcards: Any) -> list[str]:
    """Every result table of a study."""
    study = STUDIES[known("study", wildcards.study, STUDIES, "config/studies")]
    known("table", wildcards.label, study["tables"], f"config/studies/{wildcards.study}.yaml")
    return study_results(wildcards.study)


def heads_of(wildcards: Any) -> str:
    return HEADS.format(**figure_of(wildcards))


def figure_of(wildcards: Any) -> dict[str, str]:
    study = STUDIES[known("study", wildcards.study, STUDIES, "config/studies")]
    known("figure", wildcards.label, study["figures"], f"config/studies/{wildcards.study}.yaml")
    return study["figures"][wildcards.label]


def figure_title(wildcards: Any) -> str:
    shown = figure_of(wildcards)
    return f"{config['backbones'][shown['backbone']]['title']}, {shown['corpus']}, {shown['length']}"


def study_results(study: str) -> list[str]:
    protocol = STUDIES[study]
    return expand(RESULTS, benchmark=protocol["benchmarks"], backbone=backbones_of(study), length=protocol["lengths"])


def study_targets(study: str) -> list[str]:
    """Everything that `all` makes for a study."""
    figures = expand(f"{FIGURE}.{{kind}}", study=study, label=STUDIES[study]["figures"], kind=["pdf", "png"])
    return [*study_results(study), *expand(TABLE, study=study, label=STUDIES[study]["tables"]), *figures]


# ---- resources -------------------------------------------------------------------------------------------------------


def gpus(wildcards: Any) -> int:
    return int(preflight.needs_gpu(backbone_of(wildcards)))


def with_gpu(there: int, otherwise: int) -> Callable[[Any], int]:
    """One number for jobs that ask for a GPU and one for jobs that do not."""

    def choose(wildcards: Any) -> int:
        return there if gpus(wildcards) else otherwise

    return choose
