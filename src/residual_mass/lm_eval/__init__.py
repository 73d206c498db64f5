"""The tasks of lm-evaluation-harness with part of the KV cache: importing it registers the model `partial_kv`.

`python -m residual_mass.lm_eval` is the harness's command line with this model.
"""

from residual_mass.lm_eval.model import BadArgument, PartialKV

__all__ = ["BadArgument", "PartialKV"]
