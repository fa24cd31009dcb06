"""Calls of tools in OpenAI's form, as published tools read them."""

import json
from typing import Any, ClassVar

from verl.agent.tool_schemas import SchemaModel


class OpenAIFunctionParsedSchema(SchemaModel):
    """A call as the policy wrote it: `arguments` is text."""

    fields = ("name", "arguments")
    name: str
    arguments: str


class OpenAIFunctionCallSchema(SchemaModel):
    """A call whose arguments have been read."""

    fields = ("name", "arguments")
    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> "tuple[OpenAIFunctionCallSchema, bool]":
        """The call, and whether its arguments could not be read as a JSON object (they are {} then)."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except (ValueError, RecursionError):
            arguments = None
        failed = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={} if failed else arguments), failed


class OpenAIFunctionToolCall(SchemaModel):
    """A call with its id."""

    fields = ("id", "type", "function")
    defaults: ClassVar[dict[str, Any]] = {"type": "function"}
    id: str
    type: str
    function: OpenAIFunctionParsedSchema

    def __init__(self, **given: Any):
        super().__init__(**given)
        self.function = OpenAIFunctionParsedSchema.model_validate(self.function)
