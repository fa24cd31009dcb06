"""Functions on dictionaries, metrics, variables, time and event loops, as published code has them."""

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Add each value to the list in `data` that has its name, after `prefix`."""
    for name, value in new_data.items():
        data.setdefault(prefix + name.removeprefix(prefix), []).append(value)


def union_two_dict(dict1: dict[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """`dict1` with the items of `dict2`; ValueError where a name has another value in each."""
    for name in dict1.keys() & dict2.keys():
        if dict1[name] != dict2[name]:
            raise ValueError(f"{name!r} is {dict1[name]!r:.80} in one and {dict2[name]!r:.80} in the other")
    dict1.update(dict2)
    return dict1


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of each name, in order; ValueError where not all have the same names."""
    if differing := [one for one in list_of_dict if one.keys() != list_of_dict[0].keys()]:
        raise ValueError(f"the names {list(list_of_dict[0])} and {list(differing[0])} differ; give all the same")
    return {name: [one[name] for one in list_of_dict] for name in (list_of_dict[0] if list_of_dict else ())}


@contextlib.contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """The environment variable `key` is `value` in the block, and afterwards what it was."""
    before = {key: os.environ[key]} if key in os.environ else {}
    os.environ[key] = value
    try:
        yield
    finally:
        os.environ.pop(key, None)
        os.environ.update(before)


def timeout_limit(seconds: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a call that takes longer is a TimeoutError. Its thread goes on, since nothing can stop one."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            with ThreadPool(1) as pool:
                call = pool.apply_async(function, args, kwargs)
                call.wait(seconds)
                if not call.ready():
                    raise TimeoutError(f"{function.__name__} took longer than {seconds:g} seconds")
                return call.get()

        return limited

    return decorate


def reduce_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Each list as one number, in place: the maximum for a name with "max", the minimum for one with "min", else the
    mean."""
    for name, values in metrics.items():
        metrics[name] = (np.max if "max" in name else np.min if "min" in name else np.mean)(values)
    return metrics


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The running event loop; without one a new loop, which becomes the current one of this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        asyncio.set_event_loop(loop := asyncio.new_event_loop())
        return loop
