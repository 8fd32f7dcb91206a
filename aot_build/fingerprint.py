"""Build key of a kernel: a hash over all inputs that decide its artefacts. A kernel with an equal fingerprint is not rebuilt."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from .compile import compile_options
from .tools import tool_versions
from .variants import Variant

PACKAGE = "cute_mla"
_PACKAGE_FOLDER = Path(__file__).absolute().parent.parent
_BUILD_FOLDER = Path(__file__).absolute().parent


def fingerprint(variant: Variant, package_folder: Path = _PACKAGE_FOLDER, tools: Mapping[str, str] | None = None) -> str:
    """Return the sha256 over the kernel file, its imports from this package, the build's code, the tools and the options.

    tools: versions by package, by default those that are installed.
    """
    digest = hashlib.sha256()
    versions = tool_versions() if tools is None else tools
    for key, value in (*sorted(versions.items()), ("options", compile_options(variant.arch)), ("variant", repr(variant))):
        digest.update(f"{key}={value}\n".encode())
    for name, path in sorted({**transitive_sources(variant.module, package_folder), **_build_sources(_BUILD_FOLDER)}.items()):
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def transitive_sources(module: str, package_folder: Path = _PACKAGE_FOLDER) -> dict[str, Path]:
    """Return a module and its direct and indirect imports from this package, as files by name. ValueError if it does not exist."""
    found: dict[str, Path] = {}
    seen, waiting = {module}, [module]
    while waiting:
        name = waiting.pop()
        path = _file_of(name, package_folder) or (_file_outside(name) if name == module else None)
        if path is None:
            continue
        found[name] = path
        parent = name.rpartition(".")[0]  # Python runs a module's parent packages first
        others = {parent, *_imports(name, path)} - seen
        seen |= others
        waiting.extend(others)
    return found


def _file_outside(module: str) -> Path:
    """Return the file of a kernel outside this package, such as a test's. ValueError without such a module."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"no module {module}")
    return Path(spec.origin)


def _imports(module: str, path: Path) -> tuple[str, ...]:
    """Return imported names that may be modules of this package; `from a import b` gives both a and a.b."""
    return _imported(module if path.name == "__init__.py" else module.rpartition(".")[0], path.read_text())


@cache
def _imported(package: str, text: str) -> tuple[str, ...]:
    """Return the imported names of a module's text inside a package. Cached, because kernels share modules."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (parent, node.module) if part)
            found.append(base)
            found.extend(f"{base}.{alias.name}" for alias in node.names)
    return tuple(found)


def _file_of(module: str, package_folder: Path) -> Path | None:
    """Return the file of a module of this package; None for other modules, and for the package itself, which only re-exports."""
    outer, *inner = module.split(".")
    if outer != PACKAGE or not inner:
        return None
    stem = package_folder.joinpath(*inner)
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def _build_sources(folder: Path) -> dict[str, Path]:
    """Return the build's own modules in a folder. Cached, because this process has imported them.

    Modules that only pack or compare artefacts are left out. So is the list of kernels: its entry for a kernel is hashed as the variant.
    """
    room = f"{PACKAGE}.{folder.name}"
    sources = transitive_sources(f"{room}.build", folder.parent)
    return {name: path for name, path in sources.items() if name.startswith(room) and name != f"{room}.variants"}
