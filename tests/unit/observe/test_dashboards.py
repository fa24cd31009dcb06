"""The dashboards have the fields of Grafana's published schema, with their types; the checker finds what has not."""

import copy
import hashlib
import json
import re
from typing import Any

import pytest

from scripts import dashboards
from tests.grafana_schema import FILE, Schema


@pytest.fixture(scope="module")
def schema() -> Schema:
    return Schema(FILE.read_text())


def test_the_schema_is_the_unmodified_file_that_its_readme_names():
    [noted] = re.findall(r"SHA-256: `(\w+)`", (FILE.parent / "README.md").read_text())
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == noted


@pytest.mark.parametrize("name", list(dashboards.DASHBOARDS))
def test_a_dashboard_has_the_fields_of_grafanas_schema(name: str, schema: Schema):
    made = json.loads((dashboards.FOLDER / f"{name}.json").read_text())
    assert schema.errors(made) == []
    ids = [panel["id"] for panel in made["panels"]]
    assert len(set(ids)) == len(ids)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in made["panels"]]
    assert len(set(places)) == len(places) and all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in made["panels"])


WRONG: list[tuple[str, Any, str]] = [
    ("refresh", 10, "Dashboard.refresh is 10, not a string"),
    ("schemaVersion", None, "Dashboard.schemaVersion is None, not a number"),
    ("tittle", "x", "Dashboard.tittle is no field"),
    ("panels.0.gridPos.w", "12", "w is '12', not a number"),
    ("panels.0.fieldConfig.overrides", {}, "overrides is no list"),
    ("panels.0.datasource.name", "p", "datasource.name is no field"),
    ("templating.list.1.type", "quary", "not 'query'"),
    ("templating.list.1.refresh", 7, "refresh is 7, not"),
    ("templating.list.1.multi", 1, "multi is 1, not a boolean"),
]


@pytest.mark.parametrize(("path", "value", "says"), WRONG)
def test_what_is_no_field_or_has_another_type_is_found(path: str, value: Any, says: str, schema: Schema):
    made = copy.deepcopy(dashboards.dashboard("run"))
    *folders, last = path.split(".")
    place: Any = made
    for part in folders:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    errors = schema.errors(made)
    assert errors and any(says in error for error in errors), errors


def test_a_field_that_is_missing_is_found(schema: Schema):
    made = dashboards.dashboard("run")
    del made["schemaVersion"]
    assert schema.errors(made) == ["Dashboard.schemaVersion is missing"]
