"""Figures on disk, with what they were taken on."""

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers


def save(path: Path, figures: dict[str, Any]) -> None:
    """Write `figures` as JSON beside the date, the hardware and the versions of this run."""
    facts = {
        "date": datetime.date.today().isoformat(),
        "hardware": f"{os.cpu_count()} CPU cores, {cpu_name()}",
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, **figures}, indent=1) + "\n")


def cpu_name() -> str:
    """The processor's model where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
