"""Attention diagnostics: what partial-KV accounting does to every head, measured on text."""

CWE = "cwe"
"""The corpus that is no text: packs made of RULER's common words extraction."""
