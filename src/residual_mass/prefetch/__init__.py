"""Fetches what a study reads of the hub into its assets folder, and lists what the folder lacks."""
