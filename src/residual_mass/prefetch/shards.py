"""Finds the shards of a corpus that trainings read.

Follows the order of `HubStream`, so sequences are the same offline and online. Estimates the tokens of a document from
its characters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from residual_mass.study.specs import StreamNeed

MARGIN = 1.1
"""Factor of extra text, because token counts are estimates."""
SAMPLED, BATCH = 16, 1000
"""Documents tokenised per batch of documents, to estimate a shard's tokens per character."""


def shards_read(need: StreamNeed, shards: int, document_tokens: Callable[[int], Sequence[int]]) -> list[int]:
    """Returns the numbers of the shards that a training reads, in order.

    Args:
        shards: number of shards of the corpus.
        document_tokens: returns the tokens of each document of a shard; called once per shard.
    """
    from residual_mass.backbones.hub_stream import BLOCK, assign_lanes

    known = cache(document_tokens)
    used: dict[int, None] = {}

    def entered(lane: Sequence[int]) -> Iterator[int]:
        for number in lane:
            used[number] = None
            yield from known(number)

    for slot in range(need.slots):
        left = need.tokens * MARGIN
        for epoch in itertools.count():
            lanes = assign_lanes(need.corpus, shards, need.seed, slot, need.slots, epoch)
            if left <= 0 or used.keys() >= set(itertools.chain(*lanes)):
                break
            readers = [entered(lane) for lane in lanes]
            while left > 0:
                block = [count for reader in readers for count in itertools.islice(reader, BLOCK // len(readers))]
                left -= sum(block) / (1 if shards >= need.slots else need.slots)
                if not block:
                    break
    return list(used)


def tokens_in(file: Path, column: str, tokenizer: Any) -> list[int]:
    """Estimates the tokens of each document of a data file.

    Raises:
        ValueError: the file has no such column.
    """
    import pyarrow.compute as pc

    from residual_mass.backbones.asset_texts import SEPARATOR
    from residual_mass.backbones.hub_stream import open_file

    sizes: list[int] = []
    characters = tokens = 0
    for table in open_file(file).with_format("arrow").iter(batch_size=BATCH):
        if column not in table.column_names:
            raise ValueError(
                f"{file}: has no column {column!r}, only {', '.join(table.column_names)}; "
                "name the one with the text in hub_data.HUB"
            )
        sizes += pc.utf8_length(pc.fill_null(table[column], "")).to_pylist()
        for text in filter(None, table[column].slice(0, SAMPLED).to_pylist()):
            characters += len(text)
            tokens += len(tokenizer(text + SEPARATOR, add_special_tokens=False).input_ids)
    return [math.ceil(size * tokens / max(1, characters)) for size in sizes]
