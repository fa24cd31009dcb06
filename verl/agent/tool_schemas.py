"""Schemas of tools in OpenAI's form, as objects that are built from dictionaries and dumped to them.

They offer what published tools use of pydantic models (`model_validate`, `model_dump`, attributes). Keys beyond the
named ones (`items`, `anyOf`, `default` of a property, ...) are kept, so a model is shown the whole schema.
"""

import json
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from verl.utils.errors import ConfigError


class SchemaModel:
    """Keywords as attributes. `defaults` are those that may be left out; all other names of `fields` are required."""

    fields: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, **given: Any):
        missing = [name for name in self.fields if name not in given and name not in self.defaults]
        if missing:
            raise ConfigError(
                f"{type(self).__name__} needs {', '.join(missing)}; it takes {', '.join(self.fields)}, and got "
                f"{', '.join(given) or 'nothing'}"
            )
        self._given = tuple(given)
        defaults = {name: _copy(value) for name, value in self.defaults.items()}
        for name, value in {**defaults, **given}.items():
            setattr(self, name, value)

    @classmethod
    def model_validate(cls, raw: Any) -> Self:
        """The object of a dictionary; an object of this class unchanged."""
        if isinstance(raw, cls):
            return raw
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{cls.__name__} must be a dictionary of {', '.join(cls.fields)}, found {raw!r}")
        return cls(**raw)

    def model_dump(self, *, exclude_unset: bool = False, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """A dictionary of the values in the order in which they were given; unset ones and None may be left out."""
        unset = [] if exclude_unset else [name for name in self.fields if name not in self._given]
        values = {name: getattr(self, name) for name in (*self._given, *unset)}
        return {
            name: _dump(value, exclude_unset, exclude_none)
            for name, value in values.items()
            if not (exclude_none and value is None)
        }

    def model_dump_json(self, **options: Any) -> str:
        """`model_dump` as JSON text."""
        return json.dumps(self.model_dump(**options), ensure_ascii=False)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model_dump(exclude_unset=True)})"


class OpenAIFunctionPropertySchema(SchemaModel):
    """One parameter of a function."""

    fields = ("type", "description", "enum")
    defaults: ClassVar[dict[str, Any]] = {"type": None, "description": None, "enum": None}  # `anyOf` has no type
    type: Any
    description: str | None
    enum: list[Any] | None


class OpenAIFunctionParametersSchema(SchemaModel):
    """The parameters of a function by name."""

    fields = ("type", "properties", "required")
    defaults: ClassVar[dict[str, Any]] = {"type": "object", "properties": {}, "required": []}
    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str]

    def __init__(self, **given: Any):
        if "properties" in given:
            named = given["properties"].items()
            properties = {name: OpenAIFunctionPropertySchema.model_validate(value) for name, value in named}
            given = {**given, "properties": properties}
        super().__init__(**given)


class OpenAIFunctionSchema(SchemaModel):
    """Name, description and parameters of a function."""

    fields = ("name", "description", "parameters", "strict")
    defaults: ClassVar[dict[str, Any]] = {"strict": False}
    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema
    strict: bool

    def __init__(self, **given: Any):
        empty = {"type": "object", "properties": {}, "required": []}
        given = {"name": given.get("name", ""), "description": "", "parameters": empty, **given}
        super().__init__(**given)
        self.parameters = OpenAIFunctionParametersSchema.model_validate(self.parameters)


class OpenAIFunctionToolSchema(SchemaModel):
    """A tool's schema in the form that chat templates and OpenAI-compatible servers read."""

    fields = ("type", "function")
    defaults: ClassVar[dict[str, Any]] = {"type": "function"}
    type: str
    function: OpenAIFunctionSchema

    def __init__(self, **given: Any):
        _check_tool(given)
        super().__init__(**{"type": "function", **given})
        self.function = OpenAIFunctionSchema.model_validate(self.function)

    @classmethod
    def model_validate(cls, raw: Any) -> Self:
        """The schema of `{type: function, function: {name, description, parameters, strict}}`, or of an object."""
        if isinstance(raw, cls):
            return raw
        _check_tool(raw)
        return cls(**raw)


def schema_dict(tool: Any) -> dict[str, Any]:
    """A tool's schema (an object, ours or another library's, or a dictionary) as chat templates get it."""
    if isinstance(tool, Mapping):
        return dict(tool)
    dumped: dict[str, Any] = tool.model_dump(exclude_unset=True, exclude_none=True)
    return dumped


def json_types(schema: Any, root: Any) -> tuple[str, ...]:
    """The JSON types that a schema allows, in its order; empty where it does not say. `root`: where `$ref` leads."""
    found, waiting, seen = list[str](), deque([schema]), set[int]()
    while waiting:
        part = waiting.popleft()
        if not isinstance(part, Mapping) or id(part) in seen:  # a reference may lead back
            continue
        seen.add(id(part))
        if kinds := part.get("type"):
            found += [*([kinds] if isinstance(kinds, str) else map(str, kinds)), *["null"] * bool(part.get("nullable"))]
            continue
        inner = [choice for name in ("anyOf", "oneOf", "allOf") for choice in part.get(name) or ()]
        waiting.extendleft(reversed([*inner, _referenced(str(part.get("$ref", "")), root)]))
    return tuple(found)


def _referenced(pointer: str, root: Any) -> Any:
    """The schema at a JSON pointer such as `#/$defs/Name`; None if there is none."""
    for step in pointer.removeprefix("#/").split("/"):
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def _check_tool(raw: Any) -> None:
    function = raw.get("function") if isinstance(raw, Mapping) and raw.get("type", "function") == "function" else None
    if isinstance(function, OpenAIFunctionSchema):
        return
    function = function if isinstance(function, Mapping) and function.get("name") else None
    parameters = (function or {}).get("parameters", {})
    if isinstance(parameters, OpenAIFunctionParametersSchema):
        return
    properties = parameters.get("properties", {}) if isinstance(parameters, Mapping) else None
    kinds = (Mapping, OpenAIFunctionPropertySchema)
    if (
        not function
        or not isinstance(properties, Mapping)
        or not all(isinstance(p, kinds) for p in properties.values())
    ):
        raise ConfigError(
            "a tool schema must be {type: function, function: {name: …, parameters: {type: object, properties: "
            f"{{NAME: {{type: …}}}}}}}}}}, found {raw!r}"
        )


def _dump(value: Any, exclude_unset: bool, exclude_none: bool) -> Any:
    if isinstance(value, SchemaModel):
        return value.model_dump(exclude_unset=exclude_unset, exclude_none=exclude_none)
    if isinstance(value, Mapping):
        return {name: _dump(inner, exclude_unset, exclude_none) for name, inner in value.items()}
    return value


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list) else value
