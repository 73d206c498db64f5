"""The command `residual-mass`, and `python -m residual_mass`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from residual_mass.cli import main as run

        run()
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("residual_mass"):
            raise
        command = sys.argv[1] if len(sys.argv) > 1 else ""
        extra = command if command in ("measure", "serve") else "pipeline"
        remedy = f"run pip install '.[{extra}]' in a checkout"
        sys.exit(f"residual-mass: error: the package {missing.name} is missing; {remedy}")


if __name__ == "__main__":
    main()
