"""Benchmark results on disk, with date, processor and versions."""

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from verl.models.fastest import processor


def save(path: Path, figures: dict[str, Any]) -> None:
    """Write `figures` as JSON with the date, the processor's make and the versions of this run."""
    made_by = processor()
    facts = {
        "date": datetime.date.today().isoformat(),
        "hardware": f"{os.cpu_count()} CPU cores, {made_by['name']}",
        "processor": made_by,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, **figures}, indent=1) + "\n")
