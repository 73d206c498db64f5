"""Every training and generation that a study asks for, whether or not it has been run; no rules."""


class Named(dict):
    """The wildcards of a job that is not run but counted."""

    __getattr__ = dict.__getitem__


def estimate_spec(study: str) -> str:
    return spec(
        EstimateSpec, study=study, jobs=list(itertools.chain(planned_training(study), planned_generation(study)))
    )


def planned_training(study: str) -> Iterator[dict[str, Any]]:
    """The jobs that train the maps of everything `all` makes."""
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
            yield planned(PHI.format(**named), json.loads(train_spec(named)))
            if ablates and VARIANTS and length == protocol["ablations"]["length"]:
                yield planned(VARIANTS[0].format(**named), json.loads(train_variants_spec(named)))


def planned_generation(study: str) -> Iterator[dict[str, Any]]:
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
            yield planned(GENERATIONS.format(**named), json.loads(generate_spec(named)))
