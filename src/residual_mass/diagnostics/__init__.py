"""Attention diagnostics: what partial-KV accounting does to every head, measured on text."""

CWE = "cwe"
"""The corpus on which the paper makes its statements about common words."""
PROMPT_PACKS = {CWE: "ruler_cwe", "needles": "niah_multikey_3"}
"""Corpora that are not texts, with the RULER task whose prompts and answers their packs consist of.

The prompts of `needles` hold only sentences that assign one UUID to another, and ask for one of them. The answer has
about 30 tokens, enough for the decoded ones.
"""
