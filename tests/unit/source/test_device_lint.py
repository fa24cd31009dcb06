"""Nothing outside the platform layer, engine adapters and kernels may assume that the device is CUDA."""

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

# May name the device: platforms, and the adapters of engines that run there.
EXEMPT = ("verl/plugin/", "verl/workers/rollout/vllm/engine.py", "verl/workers/rollout/sglang.py")
# Names of the device that assume nothing, and why: {file: (how many, why)}.
ALLOWED = {
    "verl/checkpoint_engine/shared_memory.py": (1, "torch has handles of device memory for this device only"),
    "verl/config/explain.py": (1, "a table of other defaults, as text"),
    "verl/config/profiler.py": (1, "a word of published configurations, for what any device records"),
    "verl/observe/profiling/tools.py": (1, "the same word"),
    "verl/doors/device.py": (1, "the door's constant is_cuda_available"),
    "verl/workers/engine/base.py": (3, "the published default and lookup order of the engine registry"),
    "verl/workers/engine/fsdp_engine.py": (1, "the devices the engine registers for"),
}


def device_names(source: str) -> list[tuple[int, str]]:
    """(line, what) of every `torch.cuda`, "cuda", "cuda:0" and `.cuda()` in a module; docstrings are no code."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            root = isinstance(node.value, ast.Name) and node.value.id == "torch"
            found.append((node.lineno, "torch.cuda" if root else ".cuda"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            if node.value == "cuda" or node.value.startswith("cuda:"):
                found.append((node.lineno, repr(node.value)))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            found.append((node.lineno, f"from {node.module}"))
        elif isinstance(node, ast.Import):
            found += [(node.lineno, a.name) for a in node.names if a.name.startswith("torch.cuda")]
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [(node.lineno, "from torch import cuda") for a in node.names if a.name == "cuda"]
    return found


def violations(root: Path) -> list[str]:
    lines = []
    for path in sorted((root / "verl").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(EXEMPT):
            continue
        found = device_names(path.read_text())
        if len(found) > ALLOWED.get(name, (0, ""))[0]:
            lines += [f"{name}:{line}: {what}; ask verl.plugin.platform.get_platform()" for line, what in found]
    return lines


def test_the_core_never_assumes_cuda():
    assert not violations(ROOT), "\n" + "\n".join(violations(ROOT))


def test_no_allowance_is_larger_than_its_use():
    for name, (count, why) in ALLOWED.items():
        assert len(device_names((ROOT / name).read_text())) == count, f"{name}: {why}"


@pytest.mark.parametrize(
    "code",
    [
        "import torch\nx = torch.cuda.is_available()",
        "import torch\nx = torch.zeros(1, device='cuda')",
        "import torch\nx = torch.zeros(1, device='cuda:3')",
        "x = tensor.cuda()",
        "from torch.cuda import synchronize",
        "import torch.cuda.nvtx",
        "from torch import cuda",
    ],
)
def test_every_way_to_name_the_device_is_found(tmp_path, code):
    path = tmp_path / "verl" / "models" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert "verl/models/x.py" in violations(tmp_path)[0]


@pytest.mark.parametrize("code", ['"""Runs on cuda."""', "x = 'CUDA graphs'", "cudagraph_capture_sizes = []"])
def test_talking_about_it_is_no_use_of_it(code):
    assert device_names(code) == []
