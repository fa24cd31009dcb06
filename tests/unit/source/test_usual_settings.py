"""docs/start/usual_settings.md names keys that exist, with their defaults."""

import json

from tests.conftest import ROOT
from verl.config import schema
from verl.config.run_config import RunConfig


def test_the_usual_settings_exist_and_have_the_defaults_that_the_page_says():
    lines = (ROOT / "docs/start/usual_settings.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| `")]
    assert len(rows) == 20 and all(len(row) == 4 and all(row) for row in rows)
    keys = schema.keys(RunConfig)
    for key, _, default, _ in rows:
        value = keys[key.strip("`")].default
        assert default == f"`{value if isinstance(value, str) else json.dumps(value)}`", key
