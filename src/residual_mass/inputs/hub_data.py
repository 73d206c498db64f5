"""Data sets on the Hugging Face hub, and their pinned commits; imports nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class HubPart:
    """One split of one configuration of a data set; None is its default configuration."""

    data_set: str
    configuration: str | None
    split: str

    def __str__(self) -> str:
        return f"{self.data_set} ({self.configuration or 'default'}, {self.split})"


class HubText(NamedTuple):
    """A text corpus on the hub."""

    path: str
    configuration: str | None
    split: str
    column: str

    @property
    def part(self) -> HubPart:
        return HubPart(self.path, self.configuration, self.split)


HUB = {
    "fineweb": HubText("HuggingFaceFW/fineweb", None, "train", "text"),
    "arxiv": HubText("ccdv/arxiv-summarization", None, "train", "article"),
    "bigpatent": HubText("NortheasternUniversity/big_patent", "all", "train", "description"),
    "wikitext": HubText("Salesforce/wikitext", "wikitext-103-raw-v1", "test", "text"),
}
"""The paper's training corpora (train splits) and its diagnostics text (test split: held out)."""
ESSAYS = HubPart("baber/paul_graham_essays", None, "train")
"""RULER's haystack, as the harness fetches it."""
BABILONG = "RMT-team/babilong-1k-samples"
LONGBENCH = "Xnhyacinth/LongBench"

REVISIONS = {"Salesforce/wikitext": "b08601e04326c79dfdd32d625aee71d232d685c3"}
"""Pinned commits. Of other data sets, `prefetch` records and keeps the newest commit; without a prefetched folder they
are read at their newest one.
"""
STREAMED = tuple(name for name, text in HUB.items() if text.split == "train")
"""Corpora too large to be fetched whole."""
