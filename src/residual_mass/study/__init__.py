"""The study: its configuration, the files it makes, and the spec of every job."""
