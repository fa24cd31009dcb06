"""YAML of others, read as plain data within bounds: of depth, and of what its aliases stand for."""

from typing import Any

import yaml

from verl.config.overrides import MAX_DEPTH
from verl.utils.errors import ConfigError

MAX_VALUES = 100_000  # of a file with every alias written out


class BoundedYAMLLoader(yaml.SafeLoader):
    """SafeLoader that refuses what would end Python's stack or fill its memory; errors begin with `self.name`."""

    depth = 0

    def __init__(self, text: str):
        super().__init__(text)
        self.sizes: dict[int, int] = {}  # id of a node that is read -> the values in it, aliases written out

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node; ConfigError beyond MAX_DEPTH levels or MAX_VALUES values, and for one that holds itself."""
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self.sizes:
                raise ConfigError(f"{self.name}: an alias stands for a list or dictionary that holds it; write it out")
            return node
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ConfigError(f"{self.name}: its lists and dictionaries are more than {MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        parts: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [n for part in parts for n in (part if isinstance(part, tuple) else (part,))]  # (key, value) or value
        self.sizes[id(node)] = 1 + sum(self.sizes[id(n)] for n in inner)
        if self.sizes[id(node)] > MAX_VALUES:
            raise ConfigError(f"{self.name}: with its aliases written out it has more than {MAX_VALUES} values")
        return node
