"""The specs of what is rendered: tables, their comparison, figures, document and page; no rules."""


def data_of(cells: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
    """The saved tables whose cells a function of wildcards names."""
    return lambda wildcards: [str(Path(path).with_suffix(".json")) for path in cells(wildcards)]


def table_spec(wildcards: Any) -> str:
    study, names = STUDIES[wildcards.study], backbones_of(wildcards.study)
    benchmarks = LAYOUTS[wildcards.label].benchmarks if wildcards.label in LAYOUTS else ()
    lengths_of = {name: benchmark_lengths(study, name) for name in benchmarks if name in study["benchmarks"]}
    shown = {
        "backbones": names,
        "lengths": sorted({length for lengths in lengths_of.values() for length in lengths}, key=tokens_of),
        "lengths_of": lengths_of,
        "budgets": study["budgets"],
        "benchmarks": sorted(study["benchmarks"]),
    }
    mismatch, ablations = study["mismatch"], study["ablations"]
    if wildcards.label == "cross_length_mismatch":
        shown |= {key: mismatch[key] for key in ("backbones", "lengths", "maps")}
        shown |= {"budgets": [mismatch["budget"]], "benchmarks": ["ruler"]}
    if comparison := ABLATION_TABLES.get(wildcards.label):
        shown |= {key: ablations[key] for key in ("backbones", "benchmarks")}
        shown |= {"lengths": [ablations["length"]], "budgets": [ablations["budget"]]}
        shown |= {"maps": compared_maps(study, comparison)}
    if wildcards.label == ACCOUNTING_TABLE:
        captured = study["diagnostics"]
        shown |= {"backbones": captured["backbones"], "lengths": captured["lengths"], "budgets": [captured["budget"]]}
    if wildcards.label in (PARAMETER_TABLE, TRAINING_TABLE):
        shown |= {"budgets": [], "benchmarks": []}
    if wildcards.label.startswith(LATENCIES):
        names = [wildcards.label.removeprefix(LATENCIES)]
        shown |= {"backbones": names, "lengths": study["runtime"]["contexts"], "budgets": [], "benchmarks": []}
    titles = {name: config["backbones"][name]["title"] for name in names}
    return spec(TableSpec, study=wildcards.study, label=wildcards.label, backbone_titles=titles, **shown)


def comparison_spec(wildcards: Any) -> str:
    study = STUDIES[wildcards.study]
    parts = {"map": MapSpec, "objective": ObjectiveSpec, "replay": ReplaySpec}
    phi = study["phi"] | {key: dataclasses.asdict(parsed(cls, study["phi"][key])) for key, cls in parts.items()}
    backbones = {name: dataclasses.asdict(BACKBONES[name]) for name in backbones_of(wildcards.study)}
    return spec(
        ComparisonSpec,
        study=wildcards.study,
        settings=settings_of(study | {"phi": phi, "backbones": backbones}),
        variants={label: settings_of({"phi": changes}) for label, changes in config["variants"].items()},
    )


def numbers_spec(wildcards: Any) -> str:
    return spec(NumbersSpec, study=wildcards.study)


def figure_spec(wildcards: Any) -> str:
    study = STUDIES[wildcards.study]
    shown = figure_of(wildcards)
    names = shown.get("backbones") or [shown["backbone"]]
    titles = {name: config["backbones"][name]["title"] for name in names}
    maps = []
    if wildcards.label == "kernel_sanity":
        maps = [study["maps"]["main"]]
    if wildcards.label == FIDELITY:
        length = study["ablations"]["length"]
        maps = [length, *(maps_label(length, variant) for variant in shown["variants"])]
    return spec(
        FigureSpec,
        label=wildcards.label,
        title=figure_title(shown),
        budget_percent=study["diagnostics"]["budget"] if wildcards.label.startswith(ONE_BUDGET) else None,
        maps=maps,
        backbone_titles=titles if len(titles) > 1 else {},
    )


def figure_title(shown: dict[str, Any]) -> str:
    """The backbone, unless there are several, and the text that a figure shows."""
    backbone = shown.get("backbone") or shown["backbones"]
    names = [backbone] if isinstance(backbone, str) else backbone
    titles = [config["backbones"][name]["title"] for name in names]
    text = [shown[key] for key in ("corpus", "length") if key in shown]
    return ", ".join([*titles, *text] if len(names) == 1 else text)


def document_spec(wildcards: Any) -> str:
    shown = STUDIES[wildcards.study]["figures"]
    return spec(
        DocumentSpec,
        study=wildcards.study,
        backbones=[dataclasses.asdict(BACKBONES[name]) for name in backbones_of(wildcards.study)],
        figure_titles={label: figure_title(shown[label]) for label in figures_of(wildcards.study)},
    )


def report_spec(_: Any) -> str:
    study = STUDIES[config["study"]]
    shown = study["figures"]
    return spec(
        ReportSpec,
        study=config["study"],
        backbones=[dataclasses.asdict(BACKBONES[name]) for name in backbones_of(config["study"])],
        lengths=evaluated_lengths(study),
        budgets=study["budgets"],
        figure_titles={label: figure_title(shown[label]) for label in figures_of(config["study"])},
    )


def figures_of(study: str) -> list[str]:
    """Labels of the figures that `all` makes."""
    return [label for label in STUDIES[study]["figures"] if label != COSTS]
