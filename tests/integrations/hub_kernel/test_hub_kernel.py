"""The folder that `make hf-kernel` writes, loaded by the package kernels."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import kernels.backends
import pytest
import torch
from kernels import get_loaded_kernels, get_local_kernel
from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata
from kernels.archs import _supports_cuda_capability
from packaging.version import Version

from cute_mla.aot_build.hub_kernel import BUILD, make_hub_kernel
from cute_mla.runtime.artifacts import artifacts_folder
from cute_mla.spec.arch import Arch
from tests.integrations.transformers_models.tiny_models import make, tokens
from tests.support.documents import execute, snippets
from tests.support.kernel_module import decode
from tests.support.tree import ROOT

PAGE = ROOT / "docs" / "hugging-face-kernel.md"
REASON = "needs kernels, run by make test-transformers"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of this tree, which `kernels` is given."""
    out = tmp_path_factory.mktemp("kernel")
    make_hub_kernel(ROOT, artifacts_folder(), out)
    return out


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `kernels` choose builds as beside a torch for CUDA. Nothing else of it is replaced."""
    monkeypatch.setattr(kernels.backends, "_backend", lambda: kernels.backends.CUDA(version=Version("13.0")))


def test_the_kernel_is_found_and_computes(folder: Path, arch: Arch) -> None:
    kernel: Any = get_local_kernel(folder)
    (loaded,) = [each for each in get_loaded_kernels() if each.module is kernel]
    assert loaded.metadata.id == kernel.__name__
    assert loaded.metadata.provenance is not None
    _, findings = decode(kernel, arch.name)
    assert findings == []
    assert hasattr(getattr(torch.ops, kernel.__name__), "merge_states")
    assert set(kernel.__all__) <= set(dir(kernel))


def test_the_digests_are_those_that_kernels_computes(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy") / BUILD
    stated = Metadata.read_from_file(copied / "metadata.json").digest
    assert stated is not None
    stated.validate(Digest.hash_variant(DigestAlgorithm.SHA256, copied))
    (copied / "cache.py").write_text("")
    with pytest.raises(DigestValidationError, match=r"cache\.py"):
        stated.validate(Digest.hash_variant(DigestAlgorithm.SHA256, copied))


def test_which_devices_are_accepted(folder: Path) -> None:
    archs = Metadata.read_from_file(folder / BUILD / "metadata.json").backend.archs
    assert archs is not None
    served = [pair for pair in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)) if _supports_cuda_capability(archs, pair)]
    assert served == [(9, 0), (10, 0), (10, 3), (12, 0)]


def test_two_versions_in_one_process(folder: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".venv*", "artifacts", "build", "dist", "__pycache__"), symlinks=True)
    source = tree / "cute_mla" / "__init__.py"
    source.write_text(source.read_text().replace('__version__ = "', '__version__ = "9'))
    make_hub_kernel(tree, artifacts_folder(), tmp_path / "later")
    one: Any = get_local_kernel(folder)
    other: Any = get_local_kernel(tmp_path / "later")
    assert one.__name__ != other.__name__
    assert other.__version__ == f"9{one.__version__}"
    first, _ = decode(one, "sm90")
    second, _ = decode(other, "sm90")
    assert torch.equal(first, second)


def test_it_patches_models(folder: Path) -> None:
    """The integrations of the kernel, not those of the tree, which the other tests import."""
    kernel: Any = get_local_kernel(folder)
    patching = importlib.import_module(".integrations.transformers", kernel.__name__)
    model = make("deepseek_v3", torch.bfloat16, num_hidden_layers=1)
    assert patching.patch(model) == 1
    assert type(model.model.layers[0].self_attn).__module__.startswith(kernel.__name__)
    ids, mask = tokens(9, 4)
    with kernel.simulate("sm100", 2) as device:
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert device.launches > 6
    assert device.findings == []


def test_the_snippets_of_the_page_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    shutil.copytree(folder, tmp_path / "dist" / "hf-kernel")
    monkeypatch.chdir(tmp_path)
    ours = [snippet for snippet in snippets(PAGE) if snippet.reason == REASON]
    assert len(ours) == 2
    names: dict[str, Any] = {"__name__": "snippets"}
    with torch.random.fork_rng(devices=[]):
        for snippet in ours:
            execute(PAGE, snippet, names)
            assert capsys.readouterr().out == (snippet.printed or ""), f"line {snippet.line}"
    assert names["kernel"].__name__ in sys.modules
