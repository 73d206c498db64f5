"""Fetches a study's files from the hub into its assets folder, and lists missing ones."""
