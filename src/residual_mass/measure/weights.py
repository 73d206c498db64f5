"""What packed weights cost: the distance of full attention with them from full attention of the model as loaded."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from residual_mass.benchmarks.force import FORCED_FIELDS, token_measures
from residual_mass.benchmarks.store import RowStore, StoredRow
from residual_mass.files import sha256_text
from residual_mass.measure.arguments import Arguments
from residual_mass.measure.documents import Text
from residual_mass.model.loading import Backbone
from residual_mass.statistics import skewed_interval

log = logging.getLogger(__name__)


def weights_cost(
    args: Arguments, texts: Sequence[Text], loaded: Backbone, packed: Backbone, store: Path
) -> pd.DataFrame:
    """Measures the tokens that the methods are measured on; rows in the store are not computed again.

    Returns:
        A row for each text: `text`; `kl` of the next token with the packed weights from the model as loaded, with the
        ends `ci_low` and `ci_high` of its interval (NaN for a single document); `same_top`; and `rounding`, the KL
        between two ways of reading a text with the same packed weights, in one pass or in two. Activations are rounded
        to bfloat16, so the KL of a method can hardly be smaller than that.
    """
    lines = []
    with RowStore(store, FORCED_FIELDS) as rows:
        for text in texts:
            costs = [_keyed(sequence, args.tokens, loaded, packed) for sequence in text.sequences]
            for keys, sequence in tqdm(zip(costs, text.sequences, strict=True), desc=f"weights, {text.name}"):
                if not set(keys) <= rows.rows.keys():
                    rows.append(_rows(keys, sequence, args.tokens, loaded, packed))
            of_weights = [rows.rows[key] for key, _ in costs]
            kl = _by_document(of_weights)
            low = high = math.nan
            if len(kl) > 1:
                low, high = skewed_interval([kl])
            same = np.mean([row["same_top"] for row in of_weights])
            rounding = _by_document([rows.rows[key] for _, key in costs]).mean()
            lines.append((text.name, kl.mean(), low, high, same, rounding))
    return pd.DataFrame(lines, columns=["text", "kl", "ci_low", "ci_high", "same_top", "rounding"])


def _by_document(rows: Sequence[StoredRow]) -> np.ndarray:
    """Returns the mean KL of each row; rounding can make it negative."""
    return np.array([np.mean(row["kl"]) for row in rows]).clip(0)


def _keyed(sequence: Sequence[int], tokens: int, loaded: Backbone, packed: Backbone) -> tuple[str, str]:
    """Returns hashes of everything that determines the two rows of a document."""
    facts = [packed.identity, tokens, list(sequence)]
    of_weights = sha256_text(json.dumps(["full attention, from", loaded.identity, *facts]))
    return of_weights, sha256_text(json.dumps(["in two passes, from one", *facts]))


def _rows(
    keys: tuple[str, str], sequence: Sequence[int], tokens: int, loaded: Backbone, packed: Backbone
) -> list[StoredRow]:
    answer = torch.tensor(sequence[-tokens:])
    whole = _log_p(packed, sequence, tokens)
    in_two = _log_p(packed, sequence, tokens, len(sequence) - 1 - tokens)
    reference = _log_p(loaded, sequence, tokens)
    of_weights = token_measures(reference, whole, answer)
    of_rounding = token_measures(whole, in_two, answer)
    common = {"k": 0, "token": answer.tolist()}
    return [{"key": keys[0], **common, **of_weights}, {"key": keys[1], **common, **of_rounding}]


@torch.no_grad()
def _log_p(backbone: Backbone, sequence: Sequence[int], tokens: int, first: int = 0) -> Tensor:
    """Returns the log-probabilities [tokens, V] of the last tokens; so many `first` tokens are read apart."""
    ids = torch.tensor([list(sequence[:-1])])
    cache = DynamicCache(config=backbone.model.config)
    for part in (ids[:, :first], ids[:, first:]):
        if part.shape[1]:
            logits = backbone.model(part, past_key_values=cache, logits_to_keep=tokens).logits
    return logits[0].double().log_softmax(-1)
