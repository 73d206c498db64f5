"""The report: a study on one HTML page."""
