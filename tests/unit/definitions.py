"""Which definitions of the package a function reaches, read off the names in its code and the imports.

A name counts wherever it occurs, annotations included. Methods are reached with their class, and a class with the code
that makes its objects. Modules that are imported by a string are not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "residual_mass"


@dataclass(frozen=True)
class Module:
    """What a file defines, runs and imports.

    Attributes:
        definitions: statements by the name that they define.
        effects: statements that define nothing but run at import.
        imports: (module, name in it or None for the module itself) by local name, of imports anywhere in the file.
    """

    definitions: dict[str, list[ast.stmt]]
    effects: list[ast.stmt]
    imports: dict[str, tuple[str, str | None]]


class Package:
    """The package's modules below `source` (its `src` folder), read when they are needed."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.modules: dict[str, Module] = {}

    def reached(self, module: str, name: str, without: Iterable[str] = ()) -> dict[tuple[str, str], list[ast.stmt]]:
        """Statements by (module, defined name) of everything that `name` of `module` reaches. Leaves out the modules
        `without` and those below them. The name "" stands for what a module runs at import.
        """
        left_out = tuple(without)
        found: dict[tuple[str, str], list[ast.stmt]] = {}
        todo = [(module, name)]
        while todo:
            place = todo.pop()
            if place in found or _is_below(place[0], left_out):
                continue
            where = self._module(place[0])
            if place[1] in where.definitions:
                found[place] = where.definitions[place[1]]
                found[place[0], ""] = where.effects
                for statement in (*found[place], *where.effects):
                    todo += self._used(place[0], statement)
            elif place[1] in where.imports:  # handed on
                todo += self._imported(*where.imports[place[1]])
        return found

    def _used(self, module: str, statement: ast.stmt) -> Iterable[tuple[str, str]]:
        where = self._module(module)
        of_modules: set[int] = set()
        """Names that stand before a dot, and are of a module."""
        for node in ast.walk(statement):  # outer nodes first
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                imported, name = where.imports.get(node.value.id, ("", ""))
                if name is None:
                    of_modules.add(id(node.value))
                    yield imported, node.attr
            elif isinstance(node, ast.Name) and id(node) not in of_modules:
                if node.id in where.definitions:
                    yield module, node.id
                elif node.id in where.imports:
                    yield from self._imported(*where.imports[node.id])

    def _imported(self, module: str, name: str | None) -> Iterable[tuple[str, str]]:
        """A definition, or all those of a module that is handed on as a whole."""
        if name is not None:
            yield module, name
        else:
            yield from ((module, each) for each in self._module(module).definitions)

    def _module(self, name: str) -> Module:
        if name not in self.modules:
            tree = ast.parse(self._file(name).read_text(encoding="utf-8"))
            self.modules[name] = self._parsed(tree)
        return self.modules[name]

    def _file(self, module: str) -> Path:
        path = self.source.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _parsed(self, tree: ast.Module) -> Module:
        definitions: dict[str, list[ast.stmt]] = {}
        effects = []
        for statement in tree.body:
            names = list(_defined(statement))
            for name in names:
                definitions.setdefault(name, []).append(statement)
            if not names and not isinstance(statement, ast.Import | ast.ImportFrom | ast.If):
                effects.append(statement)
        return Module(definitions, [e for e in effects if not _is_text(e)], dict(self._imports(tree)))

    def _imports(self, tree: ast.Module) -> Iterable[tuple[str, tuple[str, str | None]]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                for alias in node.names:
                    inside = f"{node.module}.{alias.name}"
                    is_module = self._file(inside).exists()
                    yield alias.asname or alias.name, ((inside, None) if is_module else (node.module, alias.name))


def _defined(statement: ast.stmt) -> Iterable[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))


def _is_text(statement: ast.stmt) -> bool:
    """A docstring, of the module or of a constant."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_below(module: str, parents: tuple[str, ...]) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)
