"""Corpora by name: what they are, and what they are for."""

from __future__ import annotations

from residual_mass.inputs.hub_data import HUB, STREAMED

ASSETS = {
    "sotu": "State of the Union addresses",
    "wiki": "Wikipedia's paragraphs in HotpotQA",
    "pydoc": "Python's language reference, as it comes with the interpreter",
    "books": "books of Project Gutenberg",
    "code": "source files of a Python package",
}
"""What the corpora of the assets are."""
ASSET_CORPORA = ("sotu", "wiki", "pydoc")
"""Corpora of the assets to train on, without their held-out documents."""
TRAINED = (*ASSET_CORPORA, *STREAMED)
"""Corpora to train on."""
HELD_OUT_ONLY = tuple(name for name in (*ASSETS, *HUB) if name not in TRAINED)
"""Corpora that no recipe trains on, for measurements on unseen sources."""
MEASURED = (*ASSET_CORPORA, *HELD_OUT_ONLY)
"""Corpora to measure on."""
