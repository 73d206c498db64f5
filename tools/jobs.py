"""Prints every job of a target as JSON, without running any: rule, inputs, outputs, params and shell command.

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
    parser.add_argument("--directory", type=Path, help="where results/ is (default: the checkout)")
    parser.add_argument("--config", nargs="*", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    config = dict(pair.split("=", 1) for pair in given.config)
    printed, sys.stdout = sys.stdout, sys.stderr  # to the end: the workflow may say something when it ends
    jobs = planned(given.checkout.resolve(), given.directory or given.checkout, given.targets, config)
    json.dump(jobs, printed)


def planned(checkout: Path, directory: Path, targets: list[str], config: dict[str, str]) -> list[dict[str, Any]]:
    """The jobs behind `targets`, whether their files are there or not, sorted by rule and outputs."""
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
