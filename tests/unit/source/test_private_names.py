"""Private names of other packages are used where the list says, and nowhere else."""

from pathlib import Path

from scripts.private_names import PRIVATE_NAMES, private_uses


def test_every_private_name_is_listed_with_its_reason_and_none_is_listed_in_vain():
    uses = set(private_uses())
    assert sorted(uses - PRIVATE_NAMES.keys()) == [], "add them to scripts/private_names.py, or use the public name"
    assert sorted(PRIVATE_NAMES.keys() - uses) == [], "take them out of scripts/private_names.py"
    assert all(reason and public for reason, public in PRIVATE_NAMES.values())


def test_a_private_attribute_and_a_private_module_are_found(tmp_path: Path):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "a.py").write_text(
        "from torch._inner import thing\nfrom torch import _C\n"
        "class A:\n    def _mine(self): return self._mine, x._theirs\n"
    )
    assert private_uses(tmp_path) == {
        ("a.py", "torch._inner:thing"): 1,
        ("a.py", "torch:_C"): 1,
        ("a.py", "_theirs"): 1,
    }
