"""What the report page shows and whose hashes it names; no rules."""


def reported(pattern: str, compared: bool = False) -> Callable[[Any], list[str]]:
    """The files of all tables of the study that the page is of; with `compared` only where the paper's values are."""

    def files(_: Any) -> list[str]:
        study = config["study"]
        labels = STUDIES[study]["tables"]
        if compared:
            return expand(pattern, study=study) if set(labels) & set(COMPARED_TABLES) else []
        return expand(pattern, study=study, label=labels)

    return files


def figures_reported(_: Any) -> list[str]:
    return expand(f"{FIGURE}.png", study=config["study"], label=figures_of(config["study"]))


def claims_reported(_: Any) -> list[str]:
    return expand(CLAIMS, backbone=STUDIES[config["study"]]["diagnostics"]["backbones"])


def sources_reported(_: Any) -> list[str]:
    """What the page's tables and figures are made of, whose hashes it names: prompts, feature maps with the logs of their
    training, generated texts, results and captured files. Left out are captured rows, which only the audits read.
    """
    study = config["study"]
    files = [
        *frozen_prompts(study),
        *trained_files(study),
        *(job["target"] for job in planned_generation(study)),
        *study_results(study),
        *captured_files(study),
    ]
    return list(dict.fromkeys(files))


def frozen_prompts(study: str) -> list[str]:
    """The manifests, which hold the hashes of all prompts."""
    labels = dict.fromkeys(BACKBONES[name].tokenizer for name in backbones_of(study))
    return [
        path
        for benchmark in STUDIES[study]["benchmarks"]
        for path in expand(
            PROMPTS, benchmark=benchmark, tokenizer=labels, length=benchmark_lengths(STUDIES[study], benchmark)
        )
    ]


def trained_files(study: str) -> list[str]:
    """Feature maps and training logs of everything `all` makes, those of every variant included."""
    files = []
    for job in planned_training(study):
        backbone, maps = job["backbone"], job["length"]
        variants = expand(VARIANTS, backbone=backbone, maps=maps)
        if job["target"] in variants:
            files += [*variants, TRAINING_LOG.format(backbone=backbone, maps=f"{maps}-variants")]
        else:
            files += [job["target"], TRAINING_LOG.format(backbone=backbone, maps=maps)]
    return files


def captured_files(study: str) -> list[str]:
    """What is captured of every head for claims and figures, and the audits of what figures show."""
    captured = STUDIES[study]["diagnostics"]
    claimed = expand(
        [HEADS, MASS], backbone=captured["backbones"], corpus=captured["corpora"], length=captured["lengths"]
    )
    figures = [Named(study=study, label=label) for label in figures_of(study) if CAPTURED.get(label, [HEADS])]
    return [*claimed, *(path for each in figures for path in [*figure_data(each), *figure_audits(each)])]
