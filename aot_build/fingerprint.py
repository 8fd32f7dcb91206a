"""A hash over all that decides a kernel's artefacts: equal fingerprints mean that nothing need be built."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from .compile import compile_options
from .tools import tool_versions
from .variants import Variant

PACKAGE = "cute_mla"
_PACKAGE_FOLDER = Path(__file__).absolute().parent.parent
_BUILD_FOLDER = Path(__file__).absolute().parent


def fingerprint(variant: Variant, package_folder: Path = _PACKAGE_FOLDER) -> str:
    """sha256 over the kernel file and all that it imports from this package, the build's own code, the tools and the options."""
    digest = hashlib.sha256()
    for key, value in (*sorted(tool_versions().items()), ("options", compile_options(variant.arch)), ("variant", repr(variant))):
        digest.update(f"{key}={value}\n".encode())
    for name, path in sorted({**transitive_sources(variant.module, package_folder), **_build_sources()}.items()):
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def transitive_sources(module: str, package_folder: Path = _PACKAGE_FOLDER) -> dict[str, Path]:
    """The module and every module of this package that it imports, directly or not, by name. ValueError if it does not exist."""
    found: dict[str, Path] = {}
    waiting: list[tuple[str, Path | None]] = [(module, _file_of(module, package_folder) or _file_outside(module))]
    while waiting:
        name, path = waiting.pop()
        if name in found or path is None:
            continue
        found[name] = path
        around = name.rpartition(".")[0]  # the packages around a module run before it
        waiting.extend((other, _file_of(other, package_folder)) for other in (around, *_imports(name, path)))
    return found


def _file_outside(module: str) -> Path:
    """The file of a kernel that does not lie in this package, such as a test's."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"no module {module}")
    return Path(spec.origin)


def _imports(module: str, path: Path) -> tuple[str, ...]:
    """Names that may be modules of this package; `from a import b` gives both a and a.b."""
    return _imported(module if path.name == "__init__.py" else module.rpartition(".")[0], path.read_text())


@cache
def _imported(package: str, text: str) -> tuple[str, ...]:
    """_imports of a text inside a package; parsed once for all the kernels that share it."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (around, node.module) if part)
            found.append(base)
            found.extend(f"{base}.{alias.name}" for alias in node.names)
    return tuple(found)


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
    """The build itself; not what is in its folder and only packs or compares what it made, nor the list of kernels, whose word on each is
    hashed as its variant."""
    room = f"{PACKAGE}.{_BUILD_FOLDER.name}"
    sources = transitive_sources(f"{room}.build", _BUILD_FOLDER.parent)
    return {name: path for name, path in sources.items() if name.startswith(room) and name != f"{room}.variants"}
