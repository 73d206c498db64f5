"""What is computed: for every job that trains, decodes, scores or measures, its inputs and its spec, from its wildcards
alone. A wildcard that the configuration does not know ends the run in one line.

The methods are what the rules of the workflow call; `study.plan` puts the classes together.
"""
