"""`reduce_metrics`, where published trainers import it."""

from typing import Any

import numpy as np


def reduce_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Each list as one number, in place: the maximum for a name with "max", the minimum for one with "min", else the
    mean."""
    for name, values in metrics.items():
        metrics[name] = (np.max if "max" in name else np.min if "min" in name else np.mean)(values)
    return metrics
