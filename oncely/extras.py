"""Extras: a room that needs one asks for it before anything else, and says so where it is missing."""

from __future__ import annotations

from importlib import import_module

__all__ = ["needs"]


def needs(extra: str, *modules: str) -> None:
    """Raise ModuleNotFoundError that says what to install, unless the extra's modules are there."""
    for module in modules:
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}: pip install 'oncely[{extra}]'", name=error.name) from None
