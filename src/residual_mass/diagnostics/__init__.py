"""Attention diagnostics: what partial-KV accounting does to every head, measured on text."""

CWE = "cwe"
"""The corpus that the paper's statements about common words are read on."""
PROMPT_PACKS = {CWE: "ruler_cwe", "needles": "niah_multikey_3"}
"""Corpora that are no text: packs of the prompts and answers of a task of RULER.

`needles` has sentences with a UUID for another one each, without other text, and asks for one of them. The answer of
some 30 tokens leaves room for the decoded ones.
"""
