"""Attention diagnostics: what partial-KV accounting does to every head, measured on text."""
