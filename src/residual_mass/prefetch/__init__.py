"""Everything that a study reads of the hub, fetched into its assets folder; and what such a folder lacks."""
