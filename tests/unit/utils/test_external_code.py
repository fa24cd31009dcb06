"""Errors about modules that the configuration names."""

import pytest

from verl.utils.errors import ConfigError
from verl.utils.external_code import import_external, load_object


@pytest.mark.parametrize("name", ["no_such_module", "no_such_package.losses"])
def test_a_missing_external_lib_is_one_sentence_that_says_where_modules_are_found(name):
    with pytest.raises(
        ConfigError, match=rf"external_lib={name}: there is no module 'no_such_\w+'; .*PYTHONPATH"
    ) as raised:
        import_external(name)
    assert "Traceback" not in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_part_of_a_package_is_named_in_full():
    with pytest.raises(ConfigError, match=r"there is no module 'json\.nothing'"):
        load_object("pkg://json.nothing", "any", "reward.custom_reward_function")


def test_a_module_that_itself_imports_a_missing_one_shows_the_line(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"importing half_installed failed:\n(.|\n)*import not_there"):
        import_external("half_installed")
