"""A LaTeX document to a PDF, the same bytes every time, with what LaTeX there is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from residual_mass.files import atomic_write

REMEDY = "on Debian `apt install texlive-latex-extra`"
ENVIRONMENT = {"SOURCE_DATE_EPOCH": "0", "FORCE_SOURCE_DATE": "1", "max_print_line": "1000"}
"""Makes the same bytes every time, and messages that are not cut into lines of 79."""
PASSES = {"pdflatex": 2, "tectonic": 1}
"""Programs in the order of preference, and how often each must run until all numbers of pages are known."""


def run(document: Path, out: Path) -> None:
    """Compiles `document` in its folder, where nothing but `out` is left; when LaTeX fails, its messages are on stderr.

    Raises:
        ValueError: the document is missing, no LaTeX is installed, or it fails; says how.
    """
    if not document.is_file():
        raise ValueError(f"{document}: no such file; run the document stage")
    if lacking := problems():
        raise ValueError(*lacking)
    program = _latex()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "pdflatex": [
                "-no-shell-escape",
                "-interaction=nonstopmode",
                "-halt-on-error",
                f"-output-directory={folder}",
            ],
            "tectonic": ["--untrusted", "--outdir", folder],
        }
        for _ in range(PASSES[program]):
            done = subprocess.run(
                [program, *options[program], document.name],
                cwd=document.parent,
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode:
                print(done.stdout, file=sys.stderr)
                # TeX marks its errors with an exclamation mark; tectonic says so in words.
                errors = [line for line in done.stdout.splitlines() if line.startswith(("!", "error:"))]
                raise ValueError(f"{document}: {program} fails: {(errors or ['it does not say why'])[0]}")
        with atomic_write(out) as temporary:
            shutil.copyfile(Path(folder, document.with_suffix(".pdf").name), temporary)


def problems() -> list[str]:
    """Returns what this machine lacks to make a PDF, in one line with its remedy; empty where it has a LaTeX."""
    return [] if _latex() else [f"no LaTeX on PATH ({' or '.join(PASSES)}); install one, {REMEDY}"]


def _latex() -> str:
    return next((program for program in PASSES if shutil.which(program)), "")
