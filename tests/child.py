"""What a pytest that a test starts in a child process inherits."""

import os


def child_environment(**more: str) -> dict[str, str]:
    """Return this environment and ``more``, without what is of this very run of pytest.

    Neither its options nor its workers are the child's: pytest-benchmark turns itself off where it
    sees a worker of pytest-xdist.
    """
    own = ("PYTEST_ADDOPTS", "PYTEST_XDIST", "PYTEST_CURRENT_TEST")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return inherited | more
