"""What the workflow would tell the jobs of the results that have a record; no rules."""

from residual_mass.files import write_json
from residual_mass.provenance import SUFFIX

EXPECTED = "logs/verify.json"


def write_expected() -> None:
    """Writes it for the verify stage, of all results of all studies."""
    records = [path for folder in ("results", ASSETS.parent) for path in Path(folder).rglob(f"*{SUFFIX}")]
    results = {str(record).removesuffix(SUFFIX) for record in records} | {str(ASSETS)}
    made_by = {path: next((rule for rule in workflow.rules if rule.is_producer(path)), None) for path in results}
    write_json(Path(EXPECTED), {path: expected(path, rule) for path, rule in made_by.items() if rule})


def expected(path: str, rule: Any) -> dict[str, Any]:
    """What the rule would tell the job that makes a file, and the files that it would read."""
    if path == str(ASSETS):
        return {"spec": {"pins": read_pins(ROOT / "config/assets.txt")}, "inputs": []}
    wildcards = Named(rule.get_wildcards(path))
    try:
        inputs = rule.expand_input(wildcards)[0]  # first, for these refuse what the configuration no longer has
        told = rule.params.spec(wildcards) if "spec" in rule.params.keys() else "{}"
    except SystemExit as refusal:
        return {"refused": str(refusal.code)}
    unread = set(inputs.get("audits", []))  # of findings, which only wait for them
    return {"spec": json.loads(told), "inputs": sorted(set(inputs) - unread)}
