"""Checks a dashboard against the types that Grafana publishes (tests/data/grafana): fields, types, what is missing.

It reads the part of TypeScript that this generated file uses: interfaces, enums, unions, arrays, records, literals.
"""

import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "data" / "grafana" / "dashboard.types.gen.d.ts"
TOKEN = re.compile(r"""'[^']*'|"[^"]*"|-?\d+(?:\.\d+)?|[A-Za-z_]\w*(?:\.\w+)?|[{}()<>|;:?,=]""")
PLAIN = {"string": str, "number": (int, float), "boolean": bool}
Type = tuple[Any, ...]


class Schema:
    """The declared types by name."""

    def __init__(self, text: str):
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        text = re.sub(r"export declare const .*?;", "", text)
        self.tokens, self.types = TOKEN.findall(text), dict[str, Type]()
        while self.tokens:
            self._declaration()

    def errors(self, value: Any, name: str = "Dashboard") -> list[str]:
        """What is wrong with `value` as a `name`; empty: nothing."""
        return self._check(value, ("name", name), name)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _next(self, *expected: str) -> str:
        token = self.tokens.pop(0)
        assert not expected or token in expected, f"expected {expected}, found {token} {self.tokens[:5]}"
        return token

    def _declaration(self) -> None:
        self._next("export")
        kind = self._next("interface", "type", "declare")
        if kind == "declare":
            self._next("enum")
            name, members = self._next(), []
            self._next("{")
            while self._next() != "}":
                self._next("=")
                members.append(("literal", literal(self._next())))
                if self._next(",", "}") == "}":
                    break
            self.types[name] = ("union", members)
        elif kind == "interface":
            name = self._next()
            self.types[name] = self._object()
        else:
            name = self._next()
            self._next("=")
            self.types[name] = self._union()
            self._next(";")

    def _object(self) -> Type:
        self._next("{")
        fields: dict[str, tuple[bool, Type]] = {}
        while (name := self._next()) != "}":
            is_optional = self._next("?", ":") == "?"
            if is_optional:
                self._next(":")
            fields[name] = (is_optional, self._union())
            self._next(";")
        return ("object", fields)

    def _union(self) -> Type:
        members = [self._one()]
        while self.tokens[0] == "|":
            self._next()
            members.append(self._one())
        return members[0] if len(members) == 1 else ("union", members)

    def _one(self) -> Type:
        if self.tokens[0] == "{":
            return self._object()
        token = self._next()
        if token == "(":
            inside = self._union()
            self._next(")")
            return inside
        if token in ("Array", "Record"):
            self._next("<")
            if token == "Record":
                self._next("string")
                self._next(",")
            inside = self._union()
            self._next(">")
            return (token, inside)
        if token[0] in "'\"-0123456789":
            return ("literal", literal(token))
        return ("name", token)

    # --- checking ----------------------------------------------------------------------------------------------------

    def _check(self, value: Any, kind: Type, path: str) -> list[str]:
        match kind:
            case ("name", "unknown"):
                return []
            case ("name", "null"):
                return [] if value is None else [f"{path} is {value!r}, not null"]
            case ("name", str(name)) if name in PLAIN:
                is_right = isinstance(value, PLAIN[name]) and (name == "boolean" or not isinstance(value, bool))
                return [] if is_right else [f"{path} is {value!r}, not a {name}"]
            case ("name", str(name)):
                return self._check(value, self.types[name.split(".")[0]], path)
            case ("literal", wanted):
                return [] if value == wanted else [f"{path} is {value!r}, not {wanted!r}"]
            case ("union", members):
                found = [self._check(value, member, path) for member in members]
                return min(found, key=len) if all(found) else []
            case ("Array", inside):
                if not isinstance(value, list):
                    return [f"{path} is no list"]
                return [e for i, item in enumerate(value) for e in self._check(item, inside, f"{path}[{i}]")]
            case ("Record", inside):
                if not isinstance(value, dict):
                    return [f"{path} is no object"]
                return [e for key, item in value.items() for e in self._check(item, inside, f"{path}.{key}")]
            case ("object", fields):
                return self._check_fields(value, fields, path)
        raise AssertionError(kind)

    def _check_fields(self, value: Any, fields: dict[str, tuple[bool, Type]], path: str) -> list[str]:
        if not isinstance(value, dict):
            return [f"{path} is no object"]
        errors = [f"{path}.{key} is no field" for key in value if key not in fields]
        for key, (is_optional, kind) in fields.items():
            if key in value:
                errors += self._check(value[key], kind, f"{path}.{key}")
            elif not is_optional:
                errors.append(f"{path}.{key} is missing")
        return errors


def literal(token: str) -> Any:
    return token[1:-1] if token[0] in "'\"" else float(token)
