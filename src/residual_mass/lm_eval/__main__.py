"""The command line of lm-eval, to which the model `partial_kv` is known."""

from __future__ import annotations

import sys

from lm_eval.__main__ import cli_evaluate

from residual_mass.lm_eval import BadArgument


def main() -> None:
    """Runs lm-eval's own command line; a wrong argument of the model is one line and exit status 2."""
    try:
        cli_evaluate()
    except BadArgument as error:
        print(f"partial_kv: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
