"""What stages and the workflow agree on: settings, specs, names of files, columns, tasks and texts; without torch."""
