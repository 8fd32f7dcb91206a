"""The import graph of library and tests, drawn from the syntax trees: no file imports itself through others.

An edge is an import statement, wherever it stands: at the top, inside a function, or under TYPE_CHECKING. Importing a module of another
package also imports that package's __init__, except that of the root, which loads its names on first use.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from glob import glob

import pytest

from tests.support.tree import ROOT

Lines = dict[str, int]  # imported module -> line of the import
Graph = dict[str, Lines]


def sources() -> dict[str, str]:
    """Return the text of every file, also of the tests, by its module; a package's __init__ by the package and ".__init__"."""
    patterns = ("cute_mla/**/*.py", "tests/**/*.py")
    found = [name for pattern in patterns for name in glob(pattern, root_dir=ROOT, recursive=True)]  # noqa: PTH207  # it follows links
    return {name.removesuffix(".py").replace("/", "."): (ROOT / name).read_text() for name in found}


def imports(module: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the absolute name of every import; of `from a import b`, a.b."""
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)


def import_graph(texts: dict[str, str]) -> Graph:
    """Return the files that each file imports."""
    graph: Graph = {module: {} for module in texts}
    for module, text in texts.items():
        for line, name in imports(module, text):
            for target in targets(module, name, texts):
                if target != module:
                    graph[module].setdefault(target, line)
    return graph


def targets(module: str, name: str, texts: dict[str, str]) -> Iterator[str]:
    """Yield the files that an import of a name loads: a module or the package's __init__, and the __init__ of packages around it."""
    parts = name.split(".")
    own = module.split(".")[:-1]
    for length in range(2, len(parts) + 1):
        package = parts[:length]
        if own[:length] != package and f"{'.'.join(package)}.__init__" in texts:
            yield f"{'.'.join(package)}.__init__"
    if name in texts:
        yield name
    elif f"{name}.__init__" in texts:
        yield f"{name}.__init__"
    elif ".".join(parts[:-1]) in texts:
        yield ".".join(parts[:-1])
    elif f"{'.'.join(parts[:-1])}.__init__" in texts:
        yield f"{'.'.join(parts[:-1])}.__init__"


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one file (Tarjan's algorithm, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []
    for root in graph:
        if root in index:
            continue
        work = [(root, iter(graph[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            file, rest = work[-1]
            target = next(rest, None)
            if target is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[file])
                if low[file] == index[file]:
                    at = stack.index(file)
                    if len(stack) - at > 1:
                        found.append(sorted(stack[at:]))
                    del stack[at:]
            elif target not in index:
                index[target] = low[target] = len(index)
                stack.append(target)
                work.append((target, iter(graph[target])))
            elif target in stack:
                low[file] = min(low[file], index[target])
    return found


def breaches(texts: dict[str, str]) -> list[str]:
    """Return a line of text for each import of each circle: who imports what, and where."""
    graph = import_graph(texts)
    found = []
    for circle in circles(graph):
        edges = [(file, target, line) for file in circle for target, line in graph[file].items() if target in circle]
        found += [f"a circle of {len(circle)} files", *(f"  {file}:{line} imports {target}" for file, target, line in edges)]
    return found


def test_no_file_imports_itself_through_others() -> None:
    found = breaches(sources())
    assert not found, "\n".join(found)


def test_the_graph_is_that_of_the_library() -> None:
    """Every file is on the graph, and imports of every form are on it."""
    graph = import_graph(sources())
    assert len(graph) > 200
    assert "cute_mla.tracing.decode" in graph["cute_mla.api.flashmla"]  # at the top
    assert "cute_mla.runtime.cuda_device" in graph["cute_mla.runtime.current"]  # inside a function
    assert "cute_mla.simulator.__init__" in graph["cute_mla.runtime.simulated_device"]  # of a package
    assert "cute_mla.runtime.current" in graph["cute_mla.__init__"]  # under TYPE_CHECKING


@pytest.mark.parametrize(
    "back",
    [
        "from .top import f",
        "from . import top",
        "import cute_mla.room.top",
        "def g():\n    from .top import f",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cute_mla.room.top import f",
    ],
)
def test_a_circle_is_found(back: str) -> None:
    texts = {"cute_mla.room.top": "from .middle import f", "cute_mla.room.middle": "from . import bottom", "cute_mla.room.bottom": ""}
    assert breaches(texts) == []
    found = breaches({**texts, "cute_mla.room.bottom": back})
    line = back.count("\n") + 1
    assert found == [
        "a circle of 3 files",
        f"  cute_mla.room.bottom:{line} imports cute_mla.room.top",
        "  cute_mla.room.middle:1 imports cute_mla.room.bottom",
        "  cute_mla.room.top:1 imports cute_mla.room.middle",
    ]


def test_a_circle_through_a_package_is_found() -> None:
    texts = {"cute_mla.room.__init__": "from .inner import f", "cute_mla.room.inner": "from ..low import g", "cute_mla.low": ""}
    assert breaches(texts) == []
    assert breaches({**texts, "cute_mla.low": "from .room.inner import f"})
