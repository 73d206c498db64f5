"""A LaTeX document to a PDF, the same bytes every time, with what LaTeX there is."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from residual_mass.files import atomic_write

REMEDY = "on Debian `apt install texlive-latex-extra`"
REPRODUCIBLE = {"SOURCE_DATE_EPOCH": "0", "FORCE_SOURCE_DATE": "1"}
PASSES = {"pdflatex": 2, "tectonic": 1}
"""Programs in the order of preference, and how often each must run until all numbers of pages are known."""


def run(document: Path, out: Path) -> None:
    """Compiles `document` in its folder, where nothing but `out` is left; or, when LaTeX fails, its log beside `out`.

    Raises:
        ValueError: the document is missing, no LaTeX is installed, or it fails; says where the log is.
    """
    if not document.is_file():
        raise ValueError(f"{document}: no such file; run the document stage")
    program = _latex()
    if program is None:
        raise ValueError(*problems())
    log = out.with_suffix(".log")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, document.with_suffix(".pdf").name)
        for _ in range(PASSES[program]):
            said, failed = _compile(program, document, folder)
            if failed:
                log.parent.mkdir(parents=True, exist_ok=True)
                log.write_text(said, encoding="utf-8")
                raise ValueError(f"{document}: {program} fails: {_first_error(said)}; all it says is in {log}")
        with atomic_write(out) as temporary:
            shutil.copyfile(built, temporary)
    log.unlink(missing_ok=True)  # of a run that failed


def problems() -> list[str]:
    """What this machine lacks to make a PDF, in one line with its remedy; empty where it has a LaTeX."""
    return [] if _latex() else [f"no LaTeX on PATH ({' or '.join(PASSES)}); install one, {REMEDY}"]


def _latex() -> str | None:
    return next((program for program in PASSES if shutil.which(program)), None)


def _compile(program: str, document: Path, folder: str) -> tuple[str, bool]:
    """What LaTeX says, and whether it fails."""
    options = {
        "pdflatex": ["-no-shell-escape", "-interaction=nonstopmode", "-halt-on-error", f"-output-directory={folder}"],
        "tectonic": ["--untrusted", "--outdir", folder],
    }
    done = subprocess.run(
        [program, *options[program], document.name],
        cwd=document.parent,
        env={**os.environ, **REPRODUCIBLE, "max_print_line": "1000"},  # or messages are cut into lines of 79
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return done.stdout, done.returncode != 0


def _first_error(said: str) -> str:
    """TeX marks its errors with an exclamation mark; tectonic says so in words."""
    errors = [line for line in said.splitlines() if line.startswith(("!", "error:"))]
    return errors[0] if errors else "it does not say why"
