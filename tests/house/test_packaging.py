"""The installed package: lazy public names, and the pins. The wheel has tests of its own."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools.config.expand import read_attr

import cute_mla
from tests.support.tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def python(script: str) -> str:
    """Run a script in a fresh interpreter and return what it prints."""
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def loaded_by(statement: str) -> set[str]:
    """Return the heavy packages that a statement loads."""
    heavy = ("torch", "numpy", "cutlass", "cuda.bindings", "click", "rich")
    return set(python(f"import sys\n{statement}\nprint(*(name for name in {heavy} if name in sys.modules))").split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import cute_mla") == set()


def test_the_api_loads_no_more_than_torch_does() -> None:
    loaded = loaded_by("from cute_mla import flash_mla_with_kvcache, get_mla_metadata, simulate, workspace_size")
    assert "torch" in loaded
    assert loaded <= loaded_by("import torch")  # which imports cuda.bindings itself where it is installed


def test_every_public_name_is_found_where_it_is_promised() -> None:
    for name in cute_mla.__all__:
        assert getattr(cute_mla, name) is not None
        assert name in dir(cute_mla)
    assert issubclass(cute_mla.SimulationError, RuntimeError)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'cute_mla' has no attribute 'flash_mha'"):
        cute_mla.flash_mha  # noqa: B018  # the access is the test


def test_one_version() -> None:
    assert "version" not in PROJECT
    assert read_attr("cute_mla.__version__", root_dir=ROOT) == cute_mla.__version__
    assert set(re.findall(r"cute_mla-(\d[\d.]*)-", (ROOT / "README.md").read_text())) == {cute_mla.__version__}


def test_the_version_is_read_without_imports() -> None:
    read = "from setuptools.config.expand import read_attr; read_attr('cute_mla.__version__')"
    assert loaded_by(f"{read}; assert 'cute_mla' not in sys.modules") == set()


def test_the_constraints_hold_the_pins_of_the_project() -> None:
    constraints = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert constraints["torch"] == "2.13.0"
    extras = PROJECT["optional-dependencies"]
    for requirement in [*PROJECT["dependencies"], *extras["build"], *extras["dev"], *extras["docs"]]:
        name, version = re.match(r"([\w-]+)(?:\[\w+\])?(?:==(\S+))?", requirement).groups()  # type: ignore[union-attr]
        assert name in constraints
        assert version in (None, constraints[name])


def test_the_metadata_describes_the_package() -> None:
    classifiers = PROJECT["classifiers"]
    assert classifiers == sorted(set(classifiers))
    assert not [each for each in classifiers if each.startswith(("License ::", "Private ::"))]  # `license` is an SPDX expression
    least = PROJECT["requires-python"].removeprefix(">=")
    versions = [each.rpartition(" ")[2] for each in classifiers if re.search(r":: 3\.\d+$", each)]
    assert versions[0] == least
    assert "Typing :: Typed" in classifiers
    assert (ROOT / "cute_mla" / "py.typed").is_file()
    assert {"mla", "flashmla", "cuda"} <= set(PROJECT["keywords"])


def broken_links(text: str, repository: str | None) -> list[str]:
    """Return the links of a README that lead nowhere: relative ones where the repository's address is known, and missing files.

    A reader of the README outside the repository, as on a package index, needs absolute links. They are possible once project.urls has the
    address of the repository; files then lie below `repository`/blob/main.
    """
    files = f"{repository}/blob/main/"
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        relative = not re.match(r"[a-z]+:", link)
        path = link.removeprefix(files).partition("#")[0]
        if relative and link.startswith("#"):
            continue
        if (relative and repository) or ((relative or link.startswith(files)) and not (ROOT / path).is_file()):
            broken.append(link)
    return broken


def test_links_of_the_readme_work_outside_the_repository() -> None:
    repository = PROJECT.get("urls", {}).get("Repository")
    assert broken_links((ROOT / "README.md").read_text(), repository) == []


@pytest.mark.parametrize(
    ("link", "repository", "broken"),
    [
        ("CONTRIBUTING.md", None, False),
        ("CONTRIBUTING.md", "https://host.test/us/it", True),
        ("NOTHING.md", None, True),
        ("https://host.test/us/it/blob/main/CONTRIBUTING.md#set-up", "https://host.test/us/it", False),
        ("https://host.test/us/it/blob/main/NOTHING.md", "https://host.test/us/it", True),
        ("https://elsewhere.test/page", "https://host.test/us/it", False),
        ("#install", "https://host.test/us/it", False),
    ],
)
def test_broken_links_are_found(link: str, repository: str | None, broken: bool) -> None:
    assert bool(broken_links(f"See [this]({link}).", repository)) == broken


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert "make test" in script.read_text()


def test_make_test_begins_with_the_commands_of_the_hooks() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r"^lint: setup\n((?:\t.+\n)+)", makefile, re.MULTILINE)
    commands = re.findall(r"^\t\$\(BIN\)/(.+)$", recipe, re.MULTILINE)
    assert {command.split()[0] for command in commands} == {"ruff", "mypy"}
    assert re.findall(r"entry: \.venv/bin/(.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE) == commands
    assert re.findall(r"^(test\S*): lint\b", makefile, re.MULTILINE) == ["test", "test-full"]


def test_every_set_up_says_what_it_installs_before_it_does() -> None:
    recipes = re.findall(r"^\S+:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    installing = [recipe for recipe in recipes if "pip install --quiet" in recipe]
    assert len(installing) == 4
    assert all(re.search(r"@echo .set-up of .+\n\t.+ -m venv ", recipe) for recipe in installing)


@pytest.mark.parametrize("folder", ["cli", "aot_build", "profiles"])
def test_the_links_lead_to_the_folders_at_the_top(folder: str) -> None:
    assert (ROOT / "cute_mla" / folder).readlink() == Path("..", folder)
