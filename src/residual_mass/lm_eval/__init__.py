"""Tasks of lm-evaluation-harness with a partial KV cache. Importing this package registers the model `partial_kv`.

`python -m residual_mass.lm_eval` is the harness's command line with this model.
"""

from residual_mass.lm_eval.model import BadArgument, PartialKV

__all__ = ["BadArgument", "PartialKV"]
