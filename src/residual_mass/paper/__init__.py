"""Tables and figures of the paper, from result CSVs and diagnostics; imports no torch."""
