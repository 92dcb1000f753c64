"""The gate's rule about skips, tried on a run of its own."""

import shutil
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("reason", "passes"),
    [("the real traces are not here: expected them", True), ("because I say so", False)],
)
@pytest.mark.parametrize("whole_module", [False, True])
def test_only_listed_skips_pass(pytester: pytest.Pytester, reason: str, passes: bool, whole_module: bool):
    for name in ("conftest.py", "allowed_skips.txt"):
        shutil.copy(HERE / name, pytester.path / name)
    call = f"pytest.skip({reason!r}, allow_module_level=True)"
    body = call if whole_module else f"def test_one():\n    {call}"
    pytester.makepyfile(f"import pytest\n{body}\ndef test_two(): pass")
    pytester.makepyfile(test_other="def test_three(): pass")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert (result.ret == 0) == passes
    if not passes:
        result.stdout.fnmatch_lines(["*not in allowed_skips.txt*because I say so*"])
