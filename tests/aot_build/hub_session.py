"""Run by test_hub_kernel.py in a process of its own: loads a build, without cuda-python, and prints what it did as JSON.

Its arguments are the folder of the build and an architecture.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.support.kernel_module import decode, load


def main() -> None:
    """Print a JSON object."""
    sys.modules["cuda.bindings.driver"] = None  # type: ignore[assignment]  # as Python marks a module that cannot be imported
    kernel = load(Path(sys.argv[1]))
    _, findings = decode(kernel, sys.argv[2])
    traced = torch.compile(lambda outs, lses: kernel.merge_states(outs, lses)[0], backend="eager", fullgraph=True)
    states = torch.randn(2, 3, 2, 512).bfloat16(), torch.randn(2, 3, 2)
    with kernel.simulate(sys.argv[2], 2):
        same = torch.equal(traced(*(part.unbind() for part in states)), kernel.merge_states(*(part.unbind() for part in states))[0])
    seen = {
        "findings": findings,
        "traced": same,
        "ops": sorted(name for name in dir(getattr(torch.ops, kernel.__name__)) if not name.startswith("_"))[:1],
        "others": [name for name in sys.modules if name.partition(".")[0] == "cute_mla"],
        "version": kernel.__version__,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
