"""The command line of lm-eval with the model `partial_kv`."""

from __future__ import annotations

import sys

from lm_eval.__main__ import cli_evaluate

from residual_mass.lm_eval import BadArgument


def main() -> None:
    """Runs lm-eval's own command line; reports a wrong argument of the model in one line, with exit status 2."""
    try:
        cli_evaluate()
    except BadArgument as error:
        print(f"partial_kv: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
