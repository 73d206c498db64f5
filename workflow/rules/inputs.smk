"""What a job waits for, from its wildcards alone; no rules."""

ON_A_BACKBONE: dict[str, set[Path]] = {}
"""By backbone, the outputs that need it and that this run's targets lead to."""


def backbones_to_run() -> list[BackboneSpec]:
    """The backbones for which something that needs them is missing."""
    return [BACKBONES[name] for name, outputs in ON_A_BACKBONE.items() if not all(map(Path.exists, outputs))]


CAPTURED = {
    "kernel_sanity": [KERNELS, HEADS],
    FIDELITY: [KERNELS],
    "mass_curves": [MASS, HEADS],
    "training_curves": [],
    COSTS: [],
}
"""The captured files that a figure shows, where they are not those of the heads alone."""


def here(path: str) -> str:
    """A file of the repository as seen from the working directory, so that moving both together reruns nothing."""
    return os.path.relpath(ROOT / path)


def assets_for(*outputs: str) -> Callable[[Any], str]:
    """The assets manifest as input of a job that needs its backbone to make `outputs`."""

    def assets(wildcards: Any) -> str:
        study_of(wildcards)
        paths = [Path(output.format(**dict(wildcards.items()))) for output in outputs]
        ON_A_BACKBONE.setdefault(wildcards.backbone, set()).update(paths)
        return str(ASSETS)

    return assets


def assets_for_prompts(wildcards: Any) -> str:
    labels = sorted({backbone.tokenizer for backbone in BACKBONES.values()})
    known("tokenizer", wildcards.tokenizer, labels, "config/config.yaml")
    name = tokenizer_owner(wildcards.tokenizer).study
    study, where = STUDIES[name], f"config/studies/{name}.yaml"
    known("benchmark", wildcards.benchmark, study["benchmarks"], where)
    known("length", wildcards.length, benchmark_lengths(study, wildcards.benchmark), where)
    return str(ASSETS)


def prompts_of(wildcards: Any) -> str:
    tokenizer = backbone_of(wildcards).tokenizer
    return PROMPTS.format(benchmark=wildcards.benchmark, tokenizer=tokenizer, length=wildcards.length)


def phi_of(wildcards: Any) -> str:
    """The main maps."""
    return PHI.format(backbone=wildcards.backbone, maps=study_of(wildcards)["maps"]["main"])


def prompts_of_packs(wildcards: Any) -> list[str]:
    """RULER's frozen prompts, where the packs are made of them."""
    if wildcards.corpus != CWE:
        return []
    tokenizer = backbone_of(wildcards).tokenizer
    return [PROMPTS.format(benchmark="ruler", tokenizer=tokenizer, length=wildcards.length)]


def phi_of_kernels(wildcards: Any) -> list[str]:
    return expand(PHI, backbone=wildcards.backbone, maps=kernel_maps(wildcards))


def captured_by(pattern: str) -> Callable[[Any], list[str]]:
    """The files of all corpora and lengths that a backbone's findings are read out of."""

    def files(wildcards: Any) -> list[str]:
        captured = study_of(wildcards)["diagnostics"]
        known("backbone", wildcards.backbone, captured["backbones"], "diagnostics.backbones of its study")
        return expand(pattern, backbone=wildcards.backbone, corpus=captured["corpora"], length=captured["lengths"])

    return files


def phi_of_group(wildcards: Any) -> list[str]:
    labels = group_maps(study_of(wildcards), wildcards.group)
    return expand(PHI, backbone=wildcards.backbone, maps=labels)


def phi_at_length(wildcards: Any) -> list[str]:
    return expand(PHI, backbone=wildcards.backbone, maps=maps_at(wildcards))


def generations_of(wildcards: Any) -> list[str]:
    """The main arms, and for a comparison those of its maps as well."""
    study = study_of(wildcards)
    tasks = task_files(study, wildcards.benchmark, wildcards.length)
    groups = ["main"]
    if compared := wildcards.get("comparison"):
        group = "mismatch" if compared == "mismatch" else "ablation"
        groups += [group] if group_maps(study, group) else []
    return expand(GENERATIONS, **dict(wildcards.items()), group=groups, tasks=tasks)


def mismatch_of(wildcards: Any) -> list[str]:
    lengths = study_of(wildcards)["mismatch"]["lengths"]
    return expand(COMPARED, comparison="mismatch", benchmark="ruler", backbone=wildcards.backbone, length=lengths)


def ablation_of(wildcards: Any) -> list[str]:
    known("ablation", wildcards.ablation, config["ablations"], "config/config.yaml")
    ablations = study_of(wildcards)["ablations"]
    return expand(
        COMPARED,
        comparison=wildcards.ablation,
        benchmark=ablations["benchmarks"],
        backbone=wildcards.backbone,
        length=ablations["length"],
    )


def results_of(wildcards: Any) -> list[str]:
    """The result CSVs that a table shows, the feature maps that it counts, or both with their logs."""
    study = STUDIES[known("study", wildcards.study, STUDIES, "config/studies")]
    known("table", wildcards.label, study["tables"], f"config/studies/{wildcards.study}.yaml")
    if wildcards.label == "cross_length_mismatch":
        return expand(MISMATCH, backbone=study["mismatch"]["backbones"])
    if wildcards.label == ACCOUNTING_TABLE:
        return expand(ACCOUNTING, backbone=study["diagnostics"]["backbones"])
    if wildcards.label == PARAMETER_TABLE:
        return [path for name in backbones_of(wildcards.study) for path in sized_phi(study, name)]
    if wildcards.label == TRAINING_TABLE:
        return expand([PHI, TRAINING_LOG], backbone=backbones_of(wildcards.study), maps=study["maps"]["main"])
    if wildcards.label.startswith(LATENCIES):
        return [RUNTIME.format(backbone=wildcards.label.removeprefix(LATENCIES))]
    if comparison := ABLATION_TABLES.get(wildcards.label):
        return expand(ABLATION, ablation=comparison, backbone=study["ablations"]["backbones"])
    shown = [name for name in LAYOUTS[wildcards.label].benchmarks if name in study["benchmarks"]]
    return [
        path
        for benchmark in shown
        for path in expand(
            RESULTS,
            benchmark=benchmark,
            backbone=backbones_of(wildcards.study),
            length=benchmark_lengths(study, benchmark),
        )
    ]


def sized_phi(study: dict[str, Any], backbone: str) -> list[str]:
    """The main maps of a backbone, and where the ablations are made those of other widths."""
    ablated = backbone in study["ablations"]["backbones"]
    widths = [maps for maps in compared_maps(study, "dphi") if maps != study["ablations"]["length"]] if ablated else []
    return expand(PHI, backbone=backbone, maps=[study["maps"]["main"], *widths])


def facts_of(wildcards: Any) -> str:
    """The paper's own values of a table."""
    label = known("table", wildcards.label, of_the_paper.labels(), "the paper")
    return here(f"src/residual_mass/paper/published/{label}.csv")


def template_of(wildcards: Any) -> str:
    """Latencies of all backbones share one."""
    name = "runtime" if wildcards.label.startswith(LATENCIES) else wildcards.label
    return here(f"paper_tables/templates/{name}.tex.j2")


def cells_of(wildcards: Any) -> list[str]:
    """What the tables of a study print, where the paper's values are compared with it."""
    study = known("study", wildcards.study, STUDIES, "config/studies")
    labels = [label for label in STUDIES[study]["tables"] if label in COMPARED_TABLES]
    if not labels:
        sys.exit(f"config/studies/{study}.yaml: tables: has none to compare with the paper's; add one")
    return expand(CELLS, study=study, label=labels)


def numbers_cells(wildcards: Any) -> list[str]:
    """What all tables of a study print."""
    study = known("study", wildcards.study, STUDIES, "config/studies")
    if not STUDIES[study]["tables"]:
        sys.exit(f"config/studies/{study}.yaml: tables: has none whose numbers could be quoted; add one")
    return expand(CELLS, study=study, label=STUDIES[study]["tables"])


def numbers_shown(wildcards: Any) -> list[str]:
    """The macros that a document reads, where the study has tables."""
    return expand(NUMBERS, study=wildcards.study) if STUDIES[wildcards.study]["tables"] else []


def tables_of(wildcards: Any) -> list[str]:
    """What a document shows, in the order of the study's configuration; its figures are the other half."""
    study = known("study", wildcards.study, STUDIES, "config/studies")
    if not STUDIES[study]["tables"] and not figures_of(study):
        sys.exit(f"config/studies/{study}.yaml: tables, figures: has neither for a document; add one")
    return expand(TABLE, study=study, label=STUDIES[study]["tables"])


def figures_shown(wildcards: Any) -> list[str]:
    study = known("study", wildcards.study, STUDIES, "config/studies")
    return expand(f"{FIGURE}.pdf", study=study, label=figures_of(study))


def recipe_logs_of(wildcards: Any) -> list[str]:
    """The logs of every recipe and seed that a study compares."""
    recipes = study_of(wildcards)["recipes"]
    return expand(RECIPE_LOG, **dict(wildcards.items()), recipe=recipes["names"], seed=recipes["seeds"])


def figure_data(wildcards: Any) -> list[str]:
    """The files that a figure shows, in the order of its lines or rows."""
    shown = figure_of(wildcards)
    if wildcards.label == "training_curves":
        return expand(TRAINING_LOG, **shown)
    if wildcards.label == COSTS:
        lengths = STUDIES[wildcards.study]["recipes"]["lengths"]
        return expand(RECIPES_LOG, backbone=shown["backbone"], maps=lengths)
    return captured_for(wildcards, CAPTURED.get(wildcards.label, [HEADS]))


def figure_audits(wildcards: Any) -> list[str]:
    """The audits of all captured rows that a figure shows."""
    shows_rows = HEADS in CAPTURED.get(wildcards.label, [HEADS])
    return captured_for(wildcards, [AUDIT]) if shows_rows else []


def captured_for(wildcards: Any, patterns: list[str]) -> list[str]:
    """The files of the backbones, corpora and lengths that a figure shows."""
    shown = figure_of(wildcards)
    if wildcards.label == FIDELITY:
        shown = shown | {"length": STUDIES[wildcards.study]["ablations"]["length"]}
    place = {
        "backbone": shown.get("backbones") or shown["backbone"],
        "corpus": shown.get("corpora") or shown["corpus"],
        "length": shown.get("lengths") or shown["length"],
    }
    return [path for pattern in patterns for path in expand(pattern, **place)]


def figure_of(wildcards: Any) -> dict[str, Any]:
    study = STUDIES[known("study", wildcards.study, STUDIES, "config/studies")]
    known("figure", wildcards.label, study["figures"], f"config/studies/{wildcards.study}.yaml")
    return study["figures"][wildcards.label]


def study_results(study: str) -> list[str]:
    """Every result CSV of a study."""
    protocol, names = STUDIES[study], backbones_of(study)
    mismatch, ablations = protocol["mismatch"], protocol["ablations"]
    compared = [*mismatch["lengths"]] * bool(mismatch["backbones"]) + [ablations["length"]] * bool(
        ablations["backbones"]
    )
    return [
        *(
            RESULTS.format(benchmark=benchmark, backbone=name, length=length)
            for benchmark in protocol["benchmarks"]
            for name in names
            for length in benchmark_lengths(protocol, benchmark)
        ),
        *expand(MISMATCH, backbone=mismatch["backbones"]),
        *expand(ABLATION, ablation=config["ablations"], backbone=ablations["backbones"]),
        *expand(MAP_ERRORS, backbone=mismatch["backbones"] or ablations["backbones"], length=dict.fromkeys(compared)),
        *expand(RUNTIME, backbone=names),
        *diagnostics_results(study),
    ]


def diagnostics_results(study: str) -> list[str]:
    captured = STUDIES[study]["diagnostics"]
    backbones = captured["backbones"]
    return [
        *expand(AUDIT, backbone=backbones, corpus=captured["corpora"], length=captured["lengths"]),
        *(path for pattern in (ACCOUNTING, STATE_DTYPE, CLAIMS) for path in expand(pattern, backbone=backbones)),
    ]


def study_targets(study: str) -> list[str]:
    """Everything that `all` makes for the study that config.yaml names."""
    figures = figure_files(study, figures_of(study))
    tables = STUDIES[study]["tables"]
    document = [DOCUMENT] if tables or figures else []
    numbers = [NUMBERS] if tables else []
    comparison = [COMPARISON, PICTURE] if set(tables) & set(COMPARED_TABLES) else []
    return [
        *study_results(study),
        *expand(TABLE, study=study, label=tables),
        *expand([*comparison, *numbers, *document], study=study),
        *figures,
        *([REPORT] if document else []),
    ]


def recipe_targets(study: str) -> list[str]:
    """Everything that `recipes` makes for a study."""
    recipes = STUDIES[study]["recipes"]
    figures = figure_files(study, [label for label in STUDIES[study]["figures"] if label == COSTS])
    return [*expand(RECIPES_LOG, backbone=recipes["backbones"], maps=recipes["lengths"]), *figures]


def figure_files(study: str, labels: list[str]) -> list[str]:
    return expand(f"{FIGURE}.{{kind}}", study=study, label=labels, kind=["pdf", "png"])
