"""A hash over all that decides a kernel's artefacts: equal fingerprints mean that nothing need be built."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

from .compile import compile_options
from .tools import tool_versions
from .variants import Variant

PACKAGE = "cute_mla"
_PACKAGE_FOLDER = Path(__file__).absolute().parent.parent
_BUILD_FOLDER = Path(__file__).absolute().parent


def fingerprint(variant: Variant) -> str:
    """sha256 over the kernel file and all that it imports from this package, the build's own code, the tools and the options."""
    digest = hashlib.sha256()
    for key, value in (*sorted(tool_versions().items()), ("options", compile_options(variant.arch)), ("variant", repr(variant))):
        digest.update(f"{key}={value}\n".encode())
    for name, path in sorted({**transitive_sources(variant.module), **_build_sources()}.items()):
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def transitive_sources(module: str, package_folder: Path = _PACKAGE_FOLDER) -> dict[str, Path]:
    """The module and every module of this package that it imports, directly or not, by name. ValueError if it does not exist."""
    found: dict[str, Path] = {}
    waiting = [module]
    if _file_of(module, package_folder) is None:
        raise ValueError(f"no module {module} under {package_folder}")
    while waiting:
        name = waiting.pop()
        path = _file_of(name, package_folder)
        if name in found or path is None:
            continue
        found[name] = path
        waiting.append(name.rpartition(".")[0])  # the packages around it run first
        waiting.extend(_imports(name, path))
    return found


def _imports(module: str, path: Path) -> Iterator[str]:
    """Names that may be modules of this package; `from a import b` gives both a and a.b."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (around, node.module) if part)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _file_of(module: str, package_folder: Path) -> Path | None:
    """The file of a module inside this package; None for others, and for the package itself, which only re-exports."""
    outer, *inner = module.split(".")
    if outer != PACKAGE or not inner:
        return None
    place = package_folder.joinpath(*inner)
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            return path
    return None


def _build_sources() -> dict[str, Path]:
    return {f"{PACKAGE}.aot_build.{path.stem}": path for path in _BUILD_FOLDER.glob("*.py")}
