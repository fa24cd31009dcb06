"""How plug-ins are found, filtered and blamed."""

import subprocess
import sys

import pytest

from verl.plugin import load_plugins, loading
from verl.plugin.versions import at_least, newer_than, version_key
from verl.utils.errors import PluginError


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch):
    """An empty site folder on the path, with nothing loaded; returns a function that installs a plug-in into it."""
    monkeypatch.setattr(loading, "_loaded", None)
    for name in (loading.MODULES_VARIABLE, loading.FILTER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def install(module, code, entry=None):
        made.append(module)
        (tmp_path / f"{module}.py").write_text(code)
        if entry:
            info = tmp_path / f"{module}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[verl.plugins]\n{entry}\n")

    yield install
    for module in made:
        sys.modules.pop(module, None)


def names():
    return [plugin.name for plugin in load_plugins()]


def test_modules_of_the_environment_load_before_entry_points_and_only_once(site, monkeypatch):
    site("plug_a", "import builtins; builtins.plug_log.append('a')", entry="alpha = plug_a")
    site("plug_b", "import builtins; builtins.plug_log.append('b')")
    monkeypatch.setattr("builtins.plug_log", [], raising=False)
    monkeypatch.setenv(loading.MODULES_VARIABLE, " plug_b ,")
    assert names() == ["plug_b", "alpha"]
    assert names() == ["plug_b", "alpha"]
    import builtins

    assert builtins.plug_log == ["b", "a"]


def test_an_entry_point_that_is_a_function_is_called_once(site):
    site("plug_f", "called = []\ndef register(): called.append(1)", entry="f = plug_f:register")
    load_plugins()
    load_plugins()
    assert sys.modules["plug_f"].called == [1]


@pytest.mark.parametrize(
    ("value", "expected"), [("auto", ["one", "two"]), ("none", []), ("two", ["two"]), ("two, one", ["two", "one"])]
)
def test_the_filter_variable(site, monkeypatch, value, expected):
    site("plug_1", "", entry="one = plug_1")
    site("plug_2", "", entry="two = plug_2")
    monkeypatch.setenv(loading.FILTER_VARIABLE, value)
    assert names() == expected


def test_a_filter_that_names_nothing_installed_is_an_error(site, monkeypatch):
    site("plug_1", "", entry="one = plug_1")
    monkeypatch.setenv(loading.FILTER_VARIABLE, "onne")
    with pytest.raises(PluginError, match="'onne', which is not installed; did you mean 'one'"):
        load_plugins()


def test_a_plug_in_that_fails_is_named_every_time_it_is_asked_for(site, monkeypatch):
    site("plug_bad", "import no_such_vendor_sdk", entry="bad = plug_bad")
    for _ in range(2):
        with pytest.raises(PluginError, match=r"plug-in 'bad' \(entry point plug_bad\).*no_such_vendor_sdk"):
            load_plugins()
    monkeypatch.setenv(loading.FILTER_VARIABLE, "none")
    assert names() == []


def test_a_missing_module_of_the_environment_is_named(monkeypatch):
    monkeypatch.setenv(loading.MODULES_VARIABLE, "not_there")
    with pytest.raises(PluginError, match=r"plug-in 'not_there' .named in VERL_USE_EXTERNAL_MODULES"):
        load_plugins()


def test_a_plug_in_may_look_things_up_while_it_is_imported(site):
    code = "from verl.plugin.platform import PlatformRegistry\nseen = PlatformRegistry.registered_names()"
    site("plug_curious", code, entry="curious = plug_curious")
    assert names() == ["curious"]
    assert sys.modules["plug_curious"].seen[:3] == ("nvidia", "amd", "huawei")


def test_importing_verl_loads_no_plug_in_and_looking_a_platform_up_does(tmp_path):
    (tmp_path / "loud_plugin.py").write_text("print('loaded')")
    code = (
        "import verl, verl.plugin.platform as p; print('imported', flush=True); p.PlatformRegistry.get('acme'); "
        "p.PlatformRegistry.get('acme')"
    )
    env = {"PYTHONPATH": str(tmp_path), "VERL_USE_EXTERNAL_MODULES": "loud_plugin", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["imported", "loaded"]


def test_versions_sort_as_vendors_mean_them():
    ordered = [
        "0.10.2",
        "0.11.0.dev3",
        "0.11.0rc1",
        "0.11.0",
        "0.11.1.dev2+g1",
        "0.11.1",
        "7",
        "12.8",
        "25.3.rc1",
        "25.3.0",
    ]
    assert sorted(ordered, key=version_key) == ordered
    assert version_key("7.0") == version_key("7") == version_key("v7.0.0-12ab")
    assert at_least("8.3.RC1", "8.3.rc1") and not at_least(None, "1") and not newer_than("0.11.0+rocm", "0.11.0")
    with pytest.raises(ValueError, match="no version number"):
        version_key("unknown")
