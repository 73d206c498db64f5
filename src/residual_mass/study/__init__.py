"""The study: its configuration, the files it makes, and what every job is told."""
