"""Compares the results, tables and figures of two checkouts; exits with status 1 if something differs.

python tools/same_results.py BASE HEAD                          the tiny study of tests/small_study.py, in both
python tools/same_results.py BASE HEAD --mini DONE              and tables and figures of a finished study
python tools/same_results.py BASE HEAD --mini DONE --only-render
python tools/same_results.py DONE DONE                          two finished studies: nothing runs

Compares CSVs, Parquet frames, stores, prompts, feature maps, tabulars, cells, the page's words and the data of all
artists of the figures, but no measured times: columns of seconds, and numbers in tables and figures of latencies.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from PIL import Image
from preloaded import forks

TIMED_COLUMNS = r"(^|_)(seconds|hours|ms|mib|bandwidth_gb_s|device|hardware)$"
"""Columns and keys of measured times, and of the machine that was measured."""
TIMED_FILES = r"(^|/)(runtime_|training_cost_|recipe_costs|report\.html)"
"""Files in which every number is masked."""
TIMED_ROWS = r"\b(runtime_|training_cost_)|seconds\b"
"""Rows of other files in which every number is masked."""
TIME = r"\d[\d.,]* (?=(ms|s|min|h)\b)|\b[0-9a-f]{12,64}\b"
"""A measured time within a text, or the hash of a file."""
TOOLS = Path(__file__).parent
Values = dict[str, Any]
"""Values of a file by their place in it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("head", type=Path)
    parser.add_argument("--mini", type=Path, metavar="DONE", help="folder with the results/ of a finished study")
    parser.add_argument("--only-render", action="store_true", help="do not run the tiny study")
    parser.add_argument("--rtol", type=float, default=0, help="relative tolerance; for figures at least 1e-9")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "same_results",
                        help="keeps the results of commits (default: %(default)s)")  # fmt: skip
    options = parser.parse_args()
    if options.only_render and not options.mini:
        parser.error("--only-render needs --mini")
    pairs = []
    if not all((folder / "Snakefile").exists() for folder in (options.base, options.head)):
        pairs.append((options.base, options.head))
    else:
        if not options.only_render:
            pairs.append([kept(checkout, options.cache, "tiny", run_tiny) for checkout in (options.base, options.head)])
        if options.mini:
            name = f"rendered {options.mini.resolve()}"
            pairs.append([kept(checkout, options.cache, name, lambda *where: render(options.mini, *where))
                          for checkout in (options.base, options.head)])  # fmt: skip
    found, counted = [], 0
    for base, head in pairs:
        compared = compare(base, head, options.rtol)
        found += [line for line in compared if line]
        counted += len(compared)
    print("\n".join(found) or f"the same: {counted} files")
    sys.exit(bool(found))


def kept(checkout: Path, cache: Path, name: str, make: Callable[[Path, Path], None]) -> Path:
    """Returns the folder that `make` fills from a checkout; it is filled only once for a commit without changes."""
    git = ["git", "-C", str(checkout)]
    commit, changed = (
        subprocess.run([*git, *arguments], capture_output=True, text=True, check=True).stdout.strip()
        for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain"])
    )
    key = f"{checkout.resolve()}-changed" if changed else commit
    folder = cache / sha256(f"{name} {key} {(TOOLS / 'preloaded.py').read_text()}".encode()).hexdigest()[:16]
    if folder.exists() and not changed:
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        made = Path(temporary) / "made"
        make(checkout.resolve(), made)
        for path in made.iterdir():
            if path.name not in ("results", "paper_tables"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(made / "results" / "assets", ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        return made.rename(folder)


def run_tiny(checkout: Path, made: Path) -> None:
    """Runs the tiny study in a copy of the checkout."""
    write = "import sys; from pathlib import Path; from tests.small_study import write_small_study as write"
    path = {"PYTHONPATH": f"{checkout / 'src'}:{checkout}", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-P", "-c", f"{write}; write(Path(sys.argv[1]))", str(made)], env=path, check=True)
    study = made / "config" / "studies" / "mini.yaml"
    protocol = yaml.safe_load(study.read_text())
    protocol["runtime"] |= {"contexts": ["512"], "batches": [1]}  # few, because times are not compared
    study.write_text(yaml.safe_dump(protocol))
    snakemake(made, made, ["all"])


def render(mini: Path, checkout: Path, made: Path) -> None:
    """Makes those parts of paper_tables/ and the page for which `mini` has the results."""
    shutil.copytree(mini / "results", made / "results", ignore=shutil.ignore_patterns("report.html"))
    (made / "paper_tables").mkdir()
    command = [sys.executable, TOOLS / "jobs.py", "--checkout", checkout, "--directory", made]
    jobs = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    rendering = [
        job for job in jobs if all(re.match(r"paper_tables/|results/report\.", path) for path in job["output"])
    ]
    makes = {path: job for job in rendering for path in job["output"]}

    def can_run(job: dict[str, Any]) -> bool:
        return all(can_run(makes[path]) if path in makes else (made / path).exists() for path in job["input"])

    targets = [path for path, job in makes.items() if can_run(job)]
    if left := sorted(set(makes) - set(targets)):
        print(f"{checkout}: {mini} lacks inputs of {', '.join(left)}", file=sys.stderr)
    rules = {job["rule"] for job in rendering}
    snakemake(checkout, made, ["--keep-going", "--allowed-rules", *rules, "--", *targets])
    for path in set(files(made)) - set(makes):
        (made / path).unlink()  # the results, which are the same


def snakemake(checkout: Path, folder: Path, arguments: Sequence[str]) -> None:
    """Runs Snakemake in a folder, with stages as forks.

    Raises:
        SystemExit: a job failed; the message has the end of Snakemake's output and of the logs.
    """
    with tempfile.TemporaryDirectory() as temporary, forks(Path(temporary), checkout / "src") as environment:
        command = [sys.executable, "-m", "snakemake", "--snakefile", checkout / "Snakefile", "--directory", folder]
        run = subprocess.run(
            [*map(str, command), "--cores", "2", "--show-failed-logs", *arguments],
            env=environment | {"PYTHONPATH": ""},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    if run.returncode:
        sys.exit(f"{run.stdout[-6000:]}\n{checkout}: Snakemake ended with {run.returncode}")


def compare(base: Path, head: Path, rtol: float = 0) -> list[str]:
    """Returns one line for each file in either folder: empty, or how the two files differ.

    Args:
        rtol: numbers whose relative difference is smaller count as equal.
    """
    ours, theirs = (set(files(folder)) for folder in (base, head))
    lines = []
    for path in sorted(ours | theirs):
        if path in ours & theirs:
            lines.append(difference(base / path, head / path, path, rtol))
        else:
            lines.append(f"{path}: only in {'BASE' if path in ours else 'HEAD'}")
    return lines


def files(folder: Path) -> Iterator[str]:
    for part in ("results", "paper_tables"):
        for path in (folder / part).rglob("*"):
            name = path.relative_to(folder).as_posix()
            skipped = name.endswith(".meta.json") or re.match(r"results/assets/|paper_tables/templates/", name)
            if path.is_file() and path.suffix in READERS and not skipped and "_checkpoints" not in path.parts:
                yield name


def difference(base: Path, head: Path, name: str, rtol: float) -> str:
    """Returns the first place where two files differ, and the number of places; empty if they are equal."""
    if base.read_bytes() == head.read_bytes():
        return ""
    reader = READERS[base.suffix]
    mask = re.search(TIMED_FILES, name) is not None
    ours, theirs = (
        {place: masked(value) if mask else value for place, value in reader(path).items()} for path in (base, head)
    )
    if base.suffix == ".png":
        rtol = max(rtol, 1e-9)
    places = [
        place for place in ours | theirs if not same(ours.get(place, "nothing"), theirs.get(place, "nothing"), rtol)
    ]
    if not places:
        return ""
    first = places[0]
    values = [str(side.get(first, "nothing"))[:200] for side in (ours, theirs)]
    return f"{name}: {first}: {values[0]} | {values[1]} ({len(places)} of {len(ours | theirs)} values differ)"


def same(one: Any, other: Any, rtol: float) -> bool:
    if one == other:
        return True
    try:
        numbers = float(one), float(other)
    except (TypeError, ValueError):
        return False
    return all(map(math.isnan, numbers)) or math.isclose(*numbers, rel_tol=rtol, abs_tol=rtol * 1e-6)


def masked(value: Any) -> str:
    """Returns a text without its numbers and bold type."""
    text = re.sub(rf"\\textbf\{{(.*?)\}}|{TIME}", r"\1", str(value))
    return re.sub(r"[-+−]?\d[\d.,]*(e-?\d+)?|nan", "#", text)


def read_csv(path: Path) -> Values:
    with path.open(newline="", encoding="utf-8") as file:
        return of_rows(list(csv.DictReader(file)))


def of_rows(rows: Sequence[dict[str, Any]]) -> Values:
    found: Values = {"columns": list(rows[0]) if rows else []}
    for number, row in enumerate(rows, 1):
        timed = any(re.search(TIMED_ROWS, str(value)) for value in row.values())
        for column, value in row.items():
            if not re.search(TIMED_COLUMNS, str(column)):
                found[f"row {number}, {column}"] = masked(value) if timed else value
    return found


def read_parquet(path: Path) -> Values:
    frame = pd.read_parquet(path)
    return {"types": frame.dtypes.astype(str).to_dict()} | of_rows(frame.to_dict("records"))


def read_lines(path: Path) -> Values:
    """Reads a store. Another order of lines, as after an interrupted run, counts as a difference."""
    return of_rows([json.loads(line) for line in path.read_text("utf-8").splitlines()])


def read_json(path: Path) -> Values:
    return flat(json.loads(path.read_text("utf-8")))


def flat(content: Any) -> Values:
    found: Values = {}

    def flatten(value: Any, place: str) -> None:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        if not inner:
            found[place] = re.sub(TIME, "", value) if isinstance(value, str) else value
        timed = isinstance(value, dict) and re.search(TIMED_ROWS, str(value.get("place")))  # a cell of a table
        for key, each in () if timed else inner:
            if not re.search(TIMED_COLUMNS, str(key)):
                flatten(each, f"{place}/{key}")

    flatten(content, "")
    return found


def read_tex(path: Path) -> Values:
    """Returns the lines of tabulars, or all lines if there are none."""
    text = path.read_text("utf-8")
    tabulars = re.findall(r"\\begin\{tabular\}.*?\\end\{tabular\}", text, re.DOTALL)
    lines = "\n".join(tabulars or [text]).splitlines()
    return {
        f"line {n}": masked(line) if re.search(TIMED_ROWS, line) else re.sub(TIME, "", line)
        for n, line in enumerate(lines, 1)
    }


def read_figure(path: Path) -> Values:
    """Returns the data that `preloaded` adds to a PNG, or else the picture itself."""
    with Image.open(path) as picture:
        drawn = getattr(picture, "text", {}).get("Points")
        if drawn is None:
            return {"picture": picture.tobytes()}
    return flat(json.loads(drawn))


def read_tensors(path: Path) -> Values:
    from safetensors.torch import load_file  # torch takes seconds

    return {
        f"{name}{list(tensor.shape)}, element {place}": value
        for name, tensor in load_file(path).items()
        for place, value in enumerate(tensor.flatten().tolist())
    }


def read_page(path: Path) -> Values:
    """Returns the texts between tags."""
    parts = re.split(r"<(?:style|script)\b.*?</(?:style|script)>|<[^>]*>", path.read_text("utf-8"), flags=re.DOTALL)
    return {f"text {n}": " ".join(text.split()) for n, text in enumerate(filter(str.strip, parts), 1)}


READERS: dict[str, Callable[[Path], Values]] = {
    ".csv": read_csv, ".html": read_page, ".json": read_json, ".jsonl": read_lines, ".parquet": read_parquet,
    ".png": read_figure, ".safetensors": read_tensors, ".tex": read_tex,
}  # fmt: skip


if __name__ == "__main__":
    main()
