"""Frozen benchmark prompts, stored generations and their scores."""
