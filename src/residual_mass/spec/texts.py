"""Text corpora by name, and data sets of the Hugging Face hub with their pinned commits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HubPart:
    """One split of one configuration of a data set; None is its default configuration."""

    data_set: str
    configuration: str | None
    split: str
    column: str = "text"
    """Column that holds the text of a corpus."""

    def __str__(self) -> str:
        return f"{self.data_set} ({self.configuration or 'default'}, {self.split})"


ASSETS = {
    "sotu": "State of the Union addresses",
    "wiki": "Wikipedia's paragraphs in HotpotQA",
    "pydoc": "Python's language reference, as it comes with the interpreter",
    "books": "books of Project Gutenberg",
    "code": "source files of a Python package",
}
"""Descriptions of the corpora in the assets."""
HUB = {
    "fineweb": HubPart("HuggingFaceFW/fineweb", "sample-10BT", "train"),
    "arxiv": HubPart("ccdv/arxiv-summarization", None, "train", "article"),
    "bigpatent": HubPart("NortheasternUniversity/big_patent", "all", "train", "description"),
    "wikitext": HubPart("Salesforce/wikitext", "wikitext-103-raw-v1", "test"),
}
"""The paper's training corpora (train splits) and its diagnostics text (test split: held out)."""
ESSAYS = HubPart("baber/paul_graham_essays", None, "train")
"""RULER's haystack, as the harness fetches it."""
BABILONG = "RMT-team/babilong-1k-samples"
LONGBENCH = "Xnhyacinth/LongBench"
REVISIONS = {"Salesforce/wikitext": "b08601e04326c79dfdd32d625aee71d232d685c3"}
"""Pinned commits. Other data sets are read at the commit in the cache, else at the newest one."""

ASSET_CORPORA = ("sotu", "wiki", "pydoc")
"""Corpora of the assets to train on, without their held-out documents."""
HUB_TRAINED = tuple(name for name, part in HUB.items() if part.split == "train")
"""Corpora of the hub to train on; none of their documents are held out."""
TRAINED = (*ASSET_CORPORA, *HUB_TRAINED)
"""Corpora to train on."""
HELD_OUT_ONLY = tuple(name for name in (*ASSETS, *HUB) if name not in TRAINED)
"""Corpora that no recipe trains on, for measurements on unseen sources."""
MEASURED = (*ASSET_CORPORA, *HELD_OUT_ONLY)
"""Corpora to measure on."""

CWE = "cwe"
"""The corpus on which the paper makes its statements about common words."""
PROMPT_PACKS = {CWE: "ruler_cwe", "needles": "niah_multikey_3"}
"""Corpora that are not texts, with the RULER task whose prompts and answers their packs consist of.

The prompts of `needles` hold only sentences that assign one UUID to another, and ask for one of them. The answer has
about 30 tokens, enough for the decoded ones.
"""
