"""The tables: one decorated function each, which turns result rows into cells."""

from residual_mass.paper.tables import scores, residuals, costs  # noqa: F401, I001 - the order of the document
from residual_mass.paper.tables.layout import RUNTIME_PREFIX, TABLES, Table, find, middle_budget

__all__ = ["RUNTIME_PREFIX", "TABLES", "Table", "find", "middle_budget"]
