"""The state of every random number generator of a process, as JSON and tensors."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from verl.utils.errors import CheckpointError
from verl.utils.seeds import derive_seed


def generator_states(device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(states of Python and NumPy, states of torch on the host and on `device`)."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    numbers = {
        "python_rng": [version, list(internal), gauss],
        "numpy_rng": [name, [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
    }
    tensors = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        tensors["device"] = torch.get_device_module(device).get_rng_state().cpu()
    return numbers, tensors


def read_generator_states(path: Path) -> dict[str, Tensor]:
    """The tensors of `generator_states`, read from a file."""
    return load_file(path)


def check_generator_states(tensors: dict[str, Tensor], device: torch.device) -> None:
    """Raises CheckpointError if there is no state for this kind of device."""
    if device.type != "cpu" and "device" not in tensors:
        raise CheckpointError(
            f"the checkpoint was saved on a CPU and holds no generator state for {device.type}; resume on the same "
            "kind of device, or leave extra out of checkpoint.load_contents"
        )


def restore_generators(numbers: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> None:
    """Set every generator to its saved state."""
    version, internal, gauss = numbers["python_rng"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = numbers["numpy_rng"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(tensors["device"])


def states_as_json() -> dict[str, Any]:
    """The states of Python, NumPy and torch on the host, for `restore_from_json`."""
    numbers, tensors = generator_states(torch.device("cpu"))
    return {**numbers, "torch_rng": tensors["cpu"].numpy().tobytes().hex()}


def restore_from_json(states: dict[str, Any]) -> None:
    """Set the generators of Python, NumPy and torch on the host."""
    host = torch.frombuffer(bytearray.fromhex(states["torch_rng"]), dtype=torch.uint8)
    restore_generators(states, {"cpu": host}, torch.device("cpu"))


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy, and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def derive_generators(saved: str, rank: int, size: int) -> None:
    """Seed the generators from `saved`, the rank and the size, if another number of ranks saved the checkpoint."""
    seed_generators(derive_seed(0, "resumed on another number of ranks", saved, rank, size))
