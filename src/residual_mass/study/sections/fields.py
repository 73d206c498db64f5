"""pydantic's marks of fields. Where it is not installed they mark nothing: settings can be made, but not parsed."""

from __future__ import annotations

__all__ = ["AfterValidator", "Field"]

try:
    from pydantic import AfterValidator, Field
except ModuleNotFoundError:

    def AfterValidator(check: object) -> object:  # noqa: N802
        return check

    def Field(**bounds: object) -> object:  # noqa: N802
        return bounds
