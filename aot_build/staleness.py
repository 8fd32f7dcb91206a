"""Built kernels whose sources in this tree have changed since. Needs no build tools: the manifest has their versions."""

from __future__ import annotations

from collections.abc import Sequence

from cute_mla.manifest import Manifest
from cute_mla.spec.arch import ARCHS

from .fingerprint import fingerprint
from .tools import tool_versions
from .variants import closed_variants


def changed_kernels(manifest: Manifest, archs: Sequence[str]) -> list[str]:
    """Return the names of the built kernels of these architectures that this tree's sources would not make, sorted.

    Tools other than those that built a kernel do not count. A kernel that is not on the closed list any more counts.
    """
    variants = {variant.name: variant for arch in archs for variant in closed_variants(ARCHS[arch])}
    changed = []
    for name, entry in manifest.kernels.items():
        if entry.arch not in archs:
            continue
        tools = {package: entry.tools.get(package, "absent") for package in tool_versions()}
        if name not in variants or fingerprint(variants[name], tools=tools) != entry.fingerprint:
            changed.append(name)
    return sorted(changed)
