"""A process that works are forked from, one for all files that need it."""

from collections.abc import Iterator

import pytest

from tests.crash.warm import WarmProcess


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    """Return the process that works are forked from."""
    folder = tmp_path_factory.mktemp("warm")
    with (folder / "stderr").open("wb") as errors:
        process = WarmProcess(str(folder), errors)
        yield process
        process.end()
