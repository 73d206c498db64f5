"""A study beside the paper's own values."""
