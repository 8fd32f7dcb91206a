"""The rules of the house, read off the syntax trees: sizes, environment, names, and who may import whom."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from glob import glob
from pathlib import Path

import pytest

from cute_mla.spec.arch import ALIASES, ARCHS
from tests.support.tree import ROOT

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8

# First words of a docstring behind which a reader has to look for the subject.
OPAQUE_WORDS = {"Of", "Those", "That", "As", "What", "Which", "Whether", "Where", "How", "This", "It", "They"}

# The rooms that take and return torch tensors, from the bottom up: each may import those in front of it, spec and runtime.
TORCH_FACING = (
    *("reference", "ops", "tracing", "api", "flash_mla"),
    *("cache", "indexer", "torch_ops", "shared_prefix", "parallel", "layer", "convert"),
)
AT_THE_TOP = {"cli", "aot_build", "profiles"}
ANYTHING = {"testing", "cli", "profiles", "__main__"}
# Each room, and the rooms that it may import besides itself. The package's own __init__ only re-exports.
MAY_IMPORT: dict[str, set[str]] = {
    "spec": set(),
    "manifest": {"spec"},
    "kernels": {"spec", "manifest"},
    "aot_build": {"spec", "manifest", "kernels", "simulator"},
    "simulator": set(),
    "runtime": {"spec", "manifest", "simulator"},
    **{room: {"spec", "runtime", *TORCH_FACING[:i]} for i, room in enumerate(TORCH_FACING)},
    "engines": {"spec", *TORCH_FACING},
    "integrations": {"spec", *TORCH_FACING},
}

# Packages from elsewhere that only some rooms may import.
OUTSIDE: dict[str, set[str]] = {
    "cutlass": {"kernels", "aot_build", "simulator"},  # of the simulator one room: tests/simulator/test_rooms.py
    "torch": {"runtime", "engines", "integrations", *TORCH_FACING, *ANYTHING},
    "numpy": {"simulator", "runtime", *TORCH_FACING, *ANYTHING},
    "cuda": {"runtime"},
    "click": {"cli"},
    "rich": {"cli", "profiles"},
    "safetensors": {"layer", "convert"},
    "tokenizers": {"convert"},
    **{engine: {"engines"} for engine in ("vllm", "sglang")},
    "transformers": {"integrations"},
}
CUDA_MODULE = "runtime/driver.py"

# Their signatures are FlashMLA's and DeepGEMM's, which engines call, or like them: the design fixes them.
PUBLIC_API = {
    "flash_attn_varlen_backward",
    "get_mla_metadata",
    "flash_mla_with_kvcache",
    "flash_mla_sparse_fwd",
    "flash_mla_sparse_bwd",
    "attention_head_sums",
    "indexer_backward",
    "indexer_scores",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "fp8_paged_mqa_logits",
    "gather_kv_cache",
    "indexer_topk",
    "insert_kv_cache",
    "indexer_topk_prefill",
    "is_supported",
    "workspace_size",
    "write_index_cache",
    "run_keys",  # its eager body
    "run_probs",  # that of attention_head_sums
    "write_kv_cache",
    "write_pooled_index_keys",
}
# Those of adapters are their engine's.
ENGINE_API = {"supports_combination"}

# A kernel's parameters are its ABI, and a host function's are what it passes on.
DEVICE_DECORATORS = {"kernel", "jit"}

# Rooms and files that may tell one architecture from another: simulate() has a default, every GPU of the table has one, and the products
# of a block are those of a kernel on one of them.
KNOW_ARCHITECTURES = {"spec", "kernels", "runtime/current.py", "profiles/roofline.py", "profiles/launches/products.py"}

READS_ENVIRONMENT = ("runtime/artifacts.py", "simulator/sass/text_cache.py", "cli/")


def sources() -> dict[str, str]:
    """Return every shipped source file, by its path inside the package, such as "cli/build.py"."""
    package = ROOT / "cute_mla"
    found = sorted(glob("**/*.py", root_dir=package, recursive=True))  # noqa: PTH207  # unlike Path.glob it follows the links
    return {name: (package / name).read_text() for name in found}


def sources_of_tests() -> dict[str, str]:
    """Return every test file, by its path in the tree."""
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}


@lru_cache(1)  # the rules are asked about one text after the other
def nodes(text: str) -> list[ast.AST]:
    """Return all nodes of the syntax tree of a text."""
    return list(ast.walk(ast.parse(text)))


def room_of(name: str) -> str:
    """Return the room that a file or a module's path lies in: its first folder, or its own name at the top."""
    return name.partition("/")[0].removesuffix(".py")


def sizes(name: str, text: str) -> Iterator[str]:
    """Files, functions and signatures that are too long to read in one sitting."""
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{name}: {lines} lines, limit: {MAX_FILE_LINES}"
    for node in nodes(text):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - first_line(name, node) + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{name}:{node.lineno}: {node.name} has {length} lines, limit: {MAX_FUNCTION_LINES}"
        arguments = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([argument for argument in arguments if argument not in ("self", "cls")])
        if count > MAX_PARAMETERS and not is_exempt(name, node):
            yield f"{name}:{node.lineno}: {node.name} has {count} parameters, limit: {MAX_PARAMETERS}"


def is_exempt(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether the kernel ABI or the public API decides a function's parameters."""
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(target, ast.Attribute) and target.attr in DEVICE_DECORATORS:
            return True
    return is_public(name, node) or (room_of(name) == "engines" and node.name in ENGINE_API)


def is_public(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is part of the API, the eager body of one, which has its parameters, or a test's stand-in for one."""
    bodies = ("run", "run_pages", "run_rows")
    return (node.name in PUBLIC_API and room_of(name) in {*TORCH_FACING, "tests"}) or (node.name in bodies and room_of(name) == "ops")


def first_line(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the first line that counts. A public function's signature and docstring, its reference page, do not count."""
    if not is_public(name, node):
        return node.lineno
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return body[0].lineno if body else node.end_lineno or node.lineno  # without a body it is generated


def environment(name: str, text: str) -> Iterator[str]:
    """Behaviour that depends on the environment: only the places of artefacts and disassemblies and the log level may."""
    if name.startswith(READS_ENVIRONMENT):
        return
    for node in nodes(text):
        if isinstance(node, ast.Attribute):
            reads = node.attr in ("environ", "getenv", "environb", "putenv")
        else:
            reads = isinstance(node, ast.ImportFrom) and node.module == "os" and any("env" in alias.name for alias in node.names)
        if reads:
            yield f"{name}:{getattr(node, 'lineno', 0)}: reads the environment"


def imported_modules(name: str, text: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import, those inside functions too; `from a import b` gives a.b."""
    around = ["cute_mla", *name.split("/")[:-1]]
    for node in nodes(text):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = around[: len(around) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def layering(name: str, text: str) -> Iterator[str]:
    """Yield imports that do not point up the list of rooms, and outside packages that a room may not need."""
    room = room_of(name)
    if room == "__init__":
        return
    for line, module in imported_modules(name, text):
        outer, *inner = module.split(".")
        if outer == "cute_mla" and inner:
            target = inner[0]
            known = target in MAY_IMPORT or target in ANYTHING
            if known and target != room and room not in ANYTHING and target not in MAY_IMPORT[room]:
                yield f"{name}:{line}: {room} imports {target}"
        elif outer in OUTSIDE and (room not in OUTSIDE[outer] or (outer == "cuda" and name != CUDA_MODULE)):
            yield f"{name}:{line}: {room} imports {outer}"


def absolute_imports(name: str, text: str) -> Iterator[str]:
    """Yield relative imports that leave a package at the top of the tree: they read differently on its two paths."""
    top, *inner = name.split("/")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and top in AT_THE_TOP and node.level > len(inner):
            yield f"{name}:{node.lineno}: imports {node.module} of another package by dots"


def imports_of_tests(name: str, text: str) -> Iterator[str]:
    """Test modules that another module imports: what two need belongs into tests/support or a module of the folder."""
    for line, module in imported_modules(name, text):
        if any(part.startswith("test_") for part in module.split(".")):
            yield f"{name}:{line}: imports {module}"


def names(name: str, _: str) -> Iterator[str]:
    """Yield modules named after nothing, and rooms that the list above does not know."""
    if Path(name).stem in ("utils", "util", "helpers", "common", "misc"):
        yield f"{name}: say what is in it"
    if room_of(name) not in {*MAY_IMPORT, *ANYTHING, "__init__"}:
        yield f"{name}: a room that the rules do not know"


def architectures(name: str, text: str) -> Iterator[str]:
    """Code that asks which architecture it serves, outside the rooms that know them apart."""
    if room_of(name) in KNOW_ARCHITECTURES or name in KNOW_ARCHITECTURES:
        return
    symbols = {arch.upper() for arch in ARCHS}
    for node in nodes(text):
        named = node.id if isinstance(node, ast.Name) else node.name if isinstance(node, ast.alias) else None
        written = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
        if named in symbols or written in ARCHS or written in ALIASES:
            yield f"{name}:{getattr(node, 'lineno', 0)}: names the architecture {named or written}"


def docstrings(name: str, text: str) -> Iterator[str]:
    """Yield docstrings whose first word hides their subject."""
    for node in nodes(text):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "Nothing").split(maxsplit=1)
            if words[0].rstrip(",:") in OPAQUE_WORDS:
                yield f"{name}:{getattr(node, 'lineno', 1)}: a docstring begins with {words[0]!r}; supported: a verb or a noun"


Rule = Callable[[str, str], Iterator[str]]


RULES: Sequence[Rule] = (sizes, environment, layering, absolute_imports, names, architectures, docstrings)
RULES_OF_TESTS: Sequence[Rule] = (sizes, imports_of_tests, docstrings)


def breaches(texts: Mapping[str, str], rules: Sequence[Rule]) -> dict[Rule, list[str]]:
    """Return what each rule finds in these files, each of which is parsed once."""
    found: dict[Rule, list[str]] = {rule: [] for rule in rules}
    for name, text in texts.items():
        for rule in rules:
            found[rule] += rule(name, text)
    return found


@cache
def breaches_of_sources() -> dict[Rule, list[str]]:
    return breaches(sources(), RULES)


@cache
def breaches_of_tests() -> dict[Rule, list[str]]:
    return breaches(sources_of_tests(), RULES_OF_TESTS)


@pytest.mark.parametrize("rule", RULES)
def test_the_sources_keep_the_rule(rule: Rule) -> None:
    found = breaches_of_sources()[rule]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", RULES_OF_TESTS)
def test_the_tests_keep_the_rule(rule: Rule) -> None:
    found = breaches_of_tests()[rule]
    assert not found, "\n".join(found)


def test_every_room_is_looked_at() -> None:
    rooms = {room_of(name) for name in sources()}
    assert rooms >= {"spec", "manifest", "kernels", "aot_build", "simulator", "runtime", "api", "testing", "cli", "profiles"}


LONG_FUNCTION = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
NINE = "a, b, c, d, e, f, g, h, i"


@pytest.mark.parametrize(
    ("rule", "name", "text", "message"),
    [
        (sizes, "spec/x.py", "\n" * 601, "spec/x.py: 601 lines"),
        (sizes, "spec/x.py", LONG_FUNCTION, "f has 81 lines"),
        (sizes, "spec/x.py", f"def f({NINE}): pass", "f has 9 parameters"),
        (sizes, "spec/x.py", f"class A:\n    def f(self, {NINE[:-6]}, *, {NINE[-4:]}): pass", "f has 9 parameters"),
        (sizes, "api/x.py", LONG_FUNCTION.replace("f()", "is_supported()") + "    pass\n", "is_supported has 81 lines"),
        (sizes, "spec/x.py", f"def get_mla_metadata({NINE}): pass", "get_mla_metadata has 9 parameters"),
        (environment, "runtime/current.py", "import os\nos.environ['X']", "runtime/current.py:2: reads the environment"),
        (environment, "aot_build/x.py", "from os import environ", "reads the environment"),
        (environment, "spec/x.py", "import os\nos.getenv('X')", "reads the environment"),
        (layering, "spec/x.py", "from ..manifest import Manifest", "spec imports manifest"),
        (absolute_imports, "cli/x.py", "from ..spec import mla", "cli/x.py:1: imports spec of another package by dots"),
        (absolute_imports, "profiles/clock/x.py", "from ...spec.mla import D_V", "imports spec.mla of another package"),
        (layering, "spec/x.py", "from .. import manifest", "spec imports manifest"),
        (layering, "runtime/x.py", "def f():\n    from cute_mla.kernels import definition", "runtime/x.py:2: runtime imports kernels"),
        (layering, "runtime/x.py", "import cute_mla.api", "runtime imports api"),
        (layering, "runtime/x.py", "import cutlass.cute as cute", "runtime imports cutlass"),
        (layering, "api/x.py", "from ..manifest import Manifest", "api imports manifest"),
        (layering, "api/x.py", "import cutlass", "api imports cutlass"),
        (layering, "api/x.py", "from vllm import envs", "api imports vllm"),
        (layering, "api/x.py", "from ..engines import vllm", "api imports engines"),
        (layering, "layer/x.py", "from ..integrations import transformers", "layer imports integrations"),
        (layering, "layer/x.py", "from transformers import DynamicCache", "layer imports transformers"),
        (layering, "simulator/isa/x.py", "from ...runtime import driver", "simulator imports runtime"),
        (layering, "kernels/combine/x.py", "import torch", "kernels imports torch"),
        (layering, "runtime/current.py", "from cuda.bindings import driver", "runtime imports cuda"),
        (layering, "aot_build/x.py", "from cute_mla.runtime.artifacts import artifacts_folder", "aot_build imports runtime"),
        (architectures, "api/x.py", "if device.arch.name == 'sm100': pass", "api/x.py:1: names the architecture sm100"),
        (architectures, "testing/x.py", "from ..spec.arch import SM90", "names the architecture SM90"),
        (architectures, "ops/x.py", "x = {'sm103': 1}", "names the architecture sm103"),
        (imports_of_tests, "tests/ops/test_x.py", "from tests.ops.test_y import f", "tests/ops/test_x.py:1: imports tests.ops.test_y.f"),
        (imports_of_tests, "tests/support/x.py", "from tests.ops import test_y", "imports tests.ops.test_y"),
        (imports_of_tests, "tests/ops/test_x.py", "def f():\n    from .test_y import g", "tests/ops/test_x.py:2: imports"),
        (imports_of_tests, "tests/ops/test_x.py", "import test_y", "imports test_y"),
        (docstrings, "api/x.py", "def f():\n    'Whether it is.'", "api/x.py:1: a docstring begins with 'Whether'"),
        (docstrings, "api/x.py", "'''Of the plan.'''", "api/x.py:1: a docstring begins with 'Of'"),
        (names, "runtime/utils.py", "", "say what is in it"),
        (names, "extras/x.py", "", "a room that the rules do not know"),
    ],
)
def test_each_rule_finds_a_breach(rule: Rule, name: str, text: str, message: str) -> None:
    found = list(rule(name, text))
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (sizes, "spec/x.py", LONG_FUNCTION.removesuffix("    pass\n")),
        (sizes, "spec/x.py", "\n" * 600),
        (sizes, "kernels/x.py", f"@cute.kernel\ndef f({NINE}): pass"),
        (sizes, "kernels/x.py", f"@cute.jit(a=1)\ndef f({NINE}): pass"),
        (sizes, "api/x.py", f"def get_mla_metadata({NINE}): pass"),
        (sizes, "engines/vllm/x.py", f"def supports_combination({NINE}): pass"),
        (sizes, "api/x.py", LONG_FUNCTION.replace("f():", "is_supported():\n    'What it is.'")),
        (environment, "runtime/artifacts.py", "import os\nos.environ['X']"),
        (environment, "cli/verify.py", "import os\nos.environ['X']"),
        (architectures, "kernels/combine/kernel.py", "if arch.name == 'sm100': pass"),
        (architectures, "api/x.py", "'Blackwell is called sm100.'\nfrom .spec.arch import ARCHS\narch.tmem_columns"),
        (layering, "runtime/driver.py", "from cuda.bindings import driver"),
        (layering, "kernels/combine/kernel.py", "import cutlass\nfrom ..definition import KernelDefinition\nfrom cute_mla.spec import abi"),
        (layering, "api/x.py", "import torch\nfrom ..runtime.current import simulate"),
        (imports_of_tests, "tests/ops/test_x.py", "from tests.ops.paged_keys import cache_of\nimport cute_mla.testing"),
        (layering, "cli/x.py", "from cute_mla.aot_build.build import build_all"),
    ],
)
def test_no_rule_objects_to_what_is_allowed(rule: Rule, name: str, text: str) -> None:
    assert list(rule(name, text)) == []
