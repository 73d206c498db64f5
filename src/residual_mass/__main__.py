"""The command `residual-mass`, and `python -m residual_mass`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from residual_mass.cli import main as run
    except ModuleNotFoundError as missing:
        sys.exit(
            f"residual-mass: error: the package {missing.name} is missing; run pip install '.[measure]' in a checkout"
        )
    run()


if __name__ == "__main__":
    main()
