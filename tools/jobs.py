"""Prints rule, inputs, outputs, params and shell command of every job of a target as JSON, without running it.

python tools/jobs.py --config study=paper            the jobs of `all`
python tools/jobs.py --checkout OTHER --directory FOLDER TARGET...
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from snakemake.api import SnakemakeApi
from snakemake.settings.enums import Quietness
from snakemake.settings.types import ConfigSettings, DAGSettings, OutputSettings, ResourceSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["all"])
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--directory", type=Path, help="folder with results/ (default: the checkout)")
    parser.add_argument("--config", nargs="*", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    config = dict(pair.split("=", 1) for pair in options.config)
    stdout, sys.stdout = sys.stdout, sys.stderr  # for good, because the workflow may print when it ends
    jobs = planned(options.checkout.resolve(), options.directory or options.checkout, options.targets, config)
    json.dump(jobs, stdout)


def planned(checkout: Path, directory: Path, targets: list[str], config: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the jobs that `targets` need, even if their files exist, sorted by rule and outputs."""
    with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
        workflow = api.workflow(
            snakefile=checkout / "Snakefile", workdir=directory, resource_settings=ResourceSettings(cores=2),
            config_settings=ConfigSettings(config=config),
        )  # fmt: skip
        dag = workflow.dag(DAGSettings(targets=set(targets), forceall=True))
        dag.execute_workflow(executor="dryrun")
        jobs = [described(job) for job in workflow._workflow.dag.jobs if job.output]
    return sorted(jobs, key=lambda job: (job["rule"], job["output"]))


def described(job: Any) -> dict[str, Any]:
    names = {"params": {name: str(value) for name, value in job.params.items()}, "shell": job.shellcmd or ""}
    return {"rule": job.rule.name, "input": [*job.input], "output": [*job.output], **names}


if __name__ == "__main__":
    main()
