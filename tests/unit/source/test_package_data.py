"""What an installed copy holds besides the modules."""

from setuptools import Distribution

from tests.conftest import ROOT


def test_the_wheel_says_that_the_package_has_types(monkeypatch):
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files(["pyproject.toml"])
    distribution.packages, distribution.include_package_data = ["verl"], False
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    assert any("py.typed" in files for _, _, _, files in build.data_files)
