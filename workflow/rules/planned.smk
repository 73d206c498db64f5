"""Every training and generation that a study asks for, whether or not it has been run; no rules."""

DOCTOR_SPEC = "logs/doctor.json"


class Named(dict):
    """The wildcards of a job that is not run but counted."""

    __getattr__ = dict.__getitem__


def estimate_spec(study: str) -> str:
    return spec(
        EstimateSpec, study=study, jobs=list(itertools.chain(planned_training(study), planned_generation(study)))
    )


def planned_training(study: str) -> Iterator[dict[str, Any]]:
    return itertools.starmap(planned, training_jobs(study))


def planned_generation(study: str) -> Iterator[dict[str, Any]]:
    return itertools.starmap(planned, generation_jobs(study))


def training_jobs(study: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first output and the spec of every job that trains the maps of everything `all` makes."""
    protocol = STUDIES[study]
    for backbone in backbones_of(study):
        lengths = {protocol["maps"]["main"]}
        if backbone in protocol["mismatch"]["backbones"]:
            lengths |= set(protocol["mismatch"]["maps"])
        ablates = backbone in protocol["ablations"]["backbones"]
        lengths |= {protocol["ablations"]["length"]} if ablates else set()
        curves = protocol["figures"].get("training_curves", {})
        lengths |= set(curves["maps"]) if curves.get("backbone") == backbone else set()
        for length in sorted(lengths, key=tokens_of):
            named = Named(backbone=backbone, maps=length)
            yield PHI.format(**named), json.loads(train_spec(named))
            if ablates and VARIANTS and length == protocol["ablations"]["length"]:
                yield VARIANTS[0].format(**named), json.loads(train_variants_spec(named))


def generation_jobs(study: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The output and the spec of every generate job."""
    protocol = STUDIES[study]
    mismatch, ablations = protocol["mismatch"], protocol["ablations"]
    places = [
        (benchmark, backbone, length, "main")
        for benchmark in protocol["benchmarks"]
        for backbone in backbones_of(study)
        for length in benchmark_lengths(protocol, benchmark)
    ]
    places += itertools.product(["ruler"], mismatch["backbones"], mismatch["lengths"], ["mismatch"])
    places += itertools.product(ablations["benchmarks"], ablations["backbones"], [ablations["length"]], ["ablation"])
    for benchmark, backbone, length, group in (place for place in places if group_maps(protocol, place[-1])):
        for tasks in task_files(protocol, benchmark, length):
            named = Named(benchmark=benchmark, backbone=backbone, length=length, group=group, tasks=tasks)
            yield GENERATIONS.format(**named), json.loads(generate_spec(named))


def study_needs(study: str) -> str:
    """What `all` and `recipes` read of the hub, as the prefetch stage is told."""
    return to_json(hub_needs(study, reading_specs(study)))


def reading_specs(study: str) -> Iterator[dict[str, Any]]:
    """The specs of the jobs that read models, texts or benchmarks; of jobs that read alike, one."""
    protocol = STUDIES[study]
    recipes, captured = protocol["recipes"], protocol["diagnostics"]
    yield from ({"backbone": dataclasses.asdict(BACKBONES[name])} for name in backbones_of(study))
    yield from (told for _, told in training_jobs(study))
    for place in itertools.product(recipes["backbones"], recipes["lengths"], recipes["names"], recipes["seeds"]):
        named = Named(zip(("backbone", "maps", "recipe", "seed"), place))
        yield json.loads(train_recipe_spec(named))
    for tokenizer in {BACKBONES[name].tokenizer: None for name in backbones_of(study)}:
        for benchmark in protocol["benchmarks"]:
            for length in benchmark_lengths(protocol, benchmark):
                named = Named(benchmark=benchmark, tokenizer=tokenizer, length=length)
                yield json.loads(prompts_spec(named))
    for place in itertools.product(backbones_of(study), captured["corpora"], captured["lengths"]):
        yield json.loads(capture_spec(Named(zip(("backbone", "corpus", "length"), place))))


def write_doctor_spec() -> None:
    """Of all studies."""
    studies = [needs_of(study) for study in STUDIES if backbones_of(study)]
    write_text(Path(DOCTOR_SPEC), spec(DoctorSpec, studies=studies))


def needs_of(study: str) -> dict[str, Any]:
    """What a study runs on, and its large files."""
    return {
        "name": study,
        "backbones": [dataclasses.asdict(BACKBONES[name]) for name in backbones_of(study)],
        "hub": json.loads(study_needs(study)),
        "files": [*planned_prompts(study), *planned_maps(study), *planned_texts(study), *planned_rows(study)],
    }


def planned_prompts(study: str) -> Iterator[dict[str, Any]]:
    """Those of each tokenizer, under its first backbone."""
    owners = {BACKBONES[name].tokenizer: name for name in reversed(backbones_of(study))}
    for (tokenizer, backbone), benchmark in itertools.product(owners.items(), STUDIES[study]["benchmarks"]):
        settings = STUDIES[study]["benchmarks"][benchmark]
        for length in benchmark_lengths(STUDIES[study], benchmark):
            examples = examples_of(settings) * len(tasks_of(benchmark, tokens_of(length)))
            yield {
                "path": PROMPTS.format(benchmark=benchmark, tokenizer=tokenizer, length=length),
                "kind": "prompts",
                "backbone": backbone,
                "tokens": examples * tokens_of(length),
                "from_hub": settings["data_source"] == "hub" and benchmark != "ruler",  # which makes its own
            }


def planned_maps(study: str) -> Iterator[dict[str, Any]]:
    for target, told in training_jobs(study):
        shapes = [variant["map"] for variant in told["variants"]]
        yield {"path": target, "kind": "maps", "backbone": told["backbone"]["name"], "maps": shapes}


def planned_texts(study: str) -> Iterator[dict[str, Any]]:
    for target, told in generation_jobs(study):
        job = planned(target, told)
        rows = job["examples"] * len(told["arms"])
        yield {
            "path": target, "kind": "generations", "backbone": job["backbone"], "rows": rows, "tokens": job["generated"]
        }  # fmt: skip


def planned_rows(study: str) -> Iterator[dict[str, Any]]:
    """Of the backbones that are captured on every text and at every length."""
    captured = STUDIES[study]["diagnostics"]
    for place in itertools.product(captured["backbones"], captured["corpora"], captured["lengths"]):
        named = dict(zip(("backbone", "corpus", "length"), place))
        tokens = captured["audited"] * tokens_of(named["length"])
        yield {"path": ROWS.format(**named), "kind": "rows", "backbone": named["backbone"], "tokens": tokens}
