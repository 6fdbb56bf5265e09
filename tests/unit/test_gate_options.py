"""The gate's options: what a plain run leaves out, and how pytest -n groups what it runs."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from gate_stubs import Options

from tests.gate import options

LONG, SHORT = ("test_kills_long", {"long"}), ("test_kills", set())


def item(name, markers=(), path="tests/unit/test_layers.py", loadgroup=False):
    """Return a stand-in for a collected test."""
    added = []
    return SimpleNamespace(
        name=name,
        path=Path(path),
        config=SimpleNamespace(getoption=lambda name, default: loadgroup),
        get_closest_marker=lambda name: name if name in markers else None,
        add_marker=added.append,
        added=added,
    )


@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        ("", ["test_kills"]),
        ("cpu", ["test_kills"]),
        ("long", ["test_kills_long", "test_kills"]),
        ("cpu or long", ["test_kills_long", "test_kills"]),
    ],
)
def test_long_forms_run_where_the_expression_names_them(expression, kept):
    """What is left out is deselected, and so counted; pytest itself selects by the expression."""
    deselected, items = [], [item(*LONG), item(*SHORT)]
    config = Options(expression)
    config.hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))

    options.pytest_collection_modifyitems(config, items)

    assert [each.name for each in items] == kept
    assert len(items) + len(deselected) == 2


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("tests/gate/test_build.py", "gate"),
        ("tests/gate/test_quality.py", "gate"),
        ("tests/selftest/test_runs.py", "selftest"),
        ("tests/unit/test_layers.py", "test_layers"),
    ],
)
def test_one_worker_runs_tests_that_share_fixtures(path, group):
    """The gate's files share the pipeline, the self-tests their bench, a file its fixtures."""
    collected = item("test_it", path=path, loadgroup=True)

    options.pytest_itemcollected(collected)

    (mark,) = collected.added
    assert (mark.name, mark.args) == ("xdist_group", (group,))


def test_without_workers_nothing_is_grouped():
    """The marker is pytest-xdist's, which may not be installed."""
    collected = item("test_it")

    options.pytest_itemcollected(collected)

    assert collected.added == []
