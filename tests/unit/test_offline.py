"""Without a network: the bundled gate asks for none, a filled cache does, a dead hub is an error.

The hub here is a server of this process on 127.0.0.1.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from datasets import Dataset
from huggingface_hub import constants
from tiny import tiny_checkpoint, write_folder

from gptneo_trt import hub
from gptneo_trt.checkpoint import BUNDLED_FOLDER, STUDY_CHECKPOINT, checkpoint_from_source
from gptneo_trt.errors import CheckpointError
from gptneo_trt.text_sources import STUDY
from tests.child import child_environment

ROOT = Path(__file__).parents[2]
REPO, REVISION = STUDY_CHECKPOINT.split("@")
API = f"/api/models/{REPO}"
STALLED_S = 3.0  # of the product: 15
START_S = 8.0  # for a child to start on a busy machine, and more
# Python runs it in every process whose path has it: what leaves the process fails and is recorded.
NO_NETWORK = """
import os, sys

def refuse(event, arguments):
    sends = event in ("socket.connect", "socket.sendto", "socket.sendmsg")
    looks_up = event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
    if looks_up or sends and not isinstance(arguments[1], (str, bytes)):
        with open(os.environ["ATTEMPTS"], "a") as file:
            file.write(f"{event} {arguments[1:]}\\n")
        raise OSError("no network")

sys.addaudithook(refuse)
open(os.environ["ATTEMPTS"] + ".watched", "a").write("x")
"""


# The study's calibration text was published without its revision: a gate on it pins one of its own.
PINNED_CALIBRATION = """
from dataclasses import replace
from gptneo_trt.text_sources import STUDY

STUDY["calibration"] = replace(STUDY["calibration"], revision="2" * 40)
"""


# The gate without a network


@pytest.fixture
def gate(tmp_path):
    """Return a function (arguments) -> a run of the gate without a network, and its attempts."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    attempts = tmp_path / "attempts"

    def run(*arguments, blocked=True, **environment):
        environment = child_environment(**environment)
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            if name not in environment or blocked:
                environment.pop(name, None)
        if blocked:
            environment |= {"PYTHONPATH": str(tmp_path), "ATTEMPTS": str(attempts)}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "cpu"]
        command += ["tests/gate", "--variants", "fp16", f"--gate-cache={tmp_path / 'cache'}"]
        done = subprocess.run(
            [*command, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        seen = attempts.read_text().splitlines() if attempts.exists() else []
        return done, seen

    return run


def test_bundled_gate_builds_without_a_network(gate, tmp_path):
    """Plans are built and judged, and no process of the run so much as looks up a name."""
    done, attempts = gate("-k", "build")

    assert attempts == []
    assert done.returncode == 0, done.stdout
    assert re.search(r"measured (\d+) of \1 cells; \d+ more deselected", done.stdout)
    assert len((tmp_path / "attempts.watched").read_text()) >= 3  # the gate and its two builders


@pytest.mark.long
def test_whole_bundled_gate_is_the_same_without_a_network(gate, tmp_path):
    """Every cell of fp16 has the verdict, value and reason that it has with a network."""
    found = {}
    for name, blocked in (("without", False), ("blocked", True)):
        done, attempts = gate(f"--gate-report={tmp_path / name}", blocked=blocked)
        assert done.returncode == 0, done.stdout
        assert attempts == []
        cells = json.loads((tmp_path / name / "results.json").read_text())["cells"]
        found[name] = [cell for cell in cells if cell["metric"] != "build"]

    assert found["blocked"] == found["without"]
    assert len(found["blocked"]) > 20


def test_the_block_blocks(gate, tmp_path):
    """The check above can fail: a model of the hub is asked for, refused and recorded.

    The run is red within seconds and names repository, revision and the command.
    """
    started = time.monotonic()
    done, attempts = gate(
        "-k", "build", "--model", STUDY_CHECKPOINT, HF_HUB_CACHE=str(tmp_path / "hub")
    )

    assert [line.split()[0] for line in attempts] == ["socket.getaddrinfo"]
    assert done.returncode == 1
    assert_says_what_to_do(done.stdout)
    assert "measured 0 of " in done.stdout
    assert time.monotonic() - started < 60


def test_D03_gate_of_a_filled_cache_builds_without_a_network(gate, tmp_path):
    """A commit of the hub, and the study's texts, are taken from the cache alone."""
    cache, commit = tmp_path / "hub", "1" * 40
    snapshot = cache / "models--owner--mini" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(BUNDLED_FOLDER, snapshot)
    choices = {"text": ["w", "x", "y", "z"], "label": list("ABCD")}
    cache_rows(cache, STUDY["prose"], [{"text": f" = Heading {n} = \n"} for n in range(600)])
    questions = [{"question": f"Is it {n}?", "choices": choices} for n in range(310)]
    cache_rows(cache, STUDY["questions"], questions)
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    calibration = replace(STUDY["calibration"], revision="2" * 40)
    cache_rows(cache, calibration, [{"messages": turns}] * 192)
    (tmp_path / "pinned_calibration.py").write_text(PINNED_CALIBRATION)

    done, attempts = gate(
        *("-p", "pinned_calibration", "-k", "test_plan_builds"),
        *("--model", f"owner/mini@{commit}"),
        HF_HUB_CACHE=str(cache),
    )

    assert attempts == []
    assert done.returncode == 0, done.stdout
    assert re.search(r"measured 2 of 2 cells", done.stdout)


def cache_rows(cache, source, rows):
    """Put rows into a hub cache as the file of a text."""
    snapshots = cache / ("datasets--" + source.repo.replace("/", "--")) / "snapshots"
    file = snapshots / source.revision / source.file.replace("*", "00001")
    file.parent.mkdir(parents=True)
    Dataset.from_list(rows).to_parquet(file)


# A hub that answers badly, or not at all


class Hub(BaseHTTPRequestHandler):
    """Answer as the hub does; a mode says what goes wrong, and ``files`` what there is."""

    mode, files, ended, asked = "well", {}, None, ()

    def do_GET(self):
        """Answer a question for the commit, its listing or a file."""
        self.asked.append(f"{self.command} {self.path}")
        if self.path.startswith(f"{API}/revision/"):
            stage, answer = "commit", {"id": REPO, "sha": REVISION, "siblings": []}
        elif self.path.startswith(f"{API}/tree/"):
            stage, answer = "listing", self.listing()
        else:
            stage, answer = "file", self.files[Path(self.path).name]
        mode, _, where = self.mode.partition(" at ")
        if mode == "well" or stage != where:
            self.reply(200, answer)
        else:
            getattr(self, mode.split()[0])(*mode.split()[1:])

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def log_message(self, *arguments):
        """Keep quiet."""

    def listing(self):
        """Return the files of the commit, as the hub lists them."""
        return [
            {"type": "file", "path": name, "size": len(each), "oid": hashlib.sha1(each).hexdigest()}
            for name, each in self.files.items()
        ]

    def head(self, length, status=200, **more):
        """Send a status and headers."""
        self.send_response(status)
        for name, value in {"Content-Length": length, **more}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def reply(self, status, content):
        """Send bytes as a file, or anything else as JSON."""
        is_file = isinstance(content, bytes)
        body = content if is_file else json.dumps(content).encode()
        etag = f'"{hashlib.sha1(body).hexdigest()}"'
        more = {"ETag": etag, "X_Repo_Commit": REVISION} if is_file else {}
        self.head(len(body), status, **more)
        if self.command == "GET":
            self.wfile.write(body)

    def status(self, code):
        """Refuse."""
        self.head(0, int(code), Retry_After=300)

    def portal(self):
        """Answer 200 with a page for people, as a captive portal does."""
        self.reply(200, b"<html>Please log in</html>")

    def other(self):
        """Answer 200 with JSON of another kind."""
        self.reply(200, {"error": "moved"})

    def hangs(self):
        """Never answer."""
        self.ended.wait(60)

    def drops(self):
        """Close the connection."""
        self.close_connection = True
        self.connection.close()

    def trickles(self):
        """Send a byte now and then, so that no read ever times out."""
        self.head(100_000)
        while not self.ended.wait(0.5):
            self.wfile.write(b" ")

    def stalls(self):
        """Send the beginning of a file, and no more."""
        if self.command == "HEAD":
            self.reply(200, self.files["model.safetensors"])
        else:
            self.head(len(self.files["model.safetensors"]))
            self.wfile.write(b"x" * 1000)
            self.ended.wait(60)


@pytest.fixture
def hub_server(tmp_path, monkeypatch):
    """Return a function (mode, files) -> the questions asked of a hub that an empty cache has."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    ended, servers = threading.Event(), []

    def start(mode, files=None):
        asked = []
        known = {"mode": mode, "files": files or {}, "ended": ended, "asked": asked}
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (Hub,), known))
        server.handle_error = lambda *_: None
        servers.append(server)
        threading.Thread(target=partial(server.serve_forever, 0.05), daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        return asked

    yield start
    ended.set()
    for server in servers:
        server.shutdown()
        server.server_close()


def assert_says_what_to_do(message):
    """Hold a message against what it must name."""
    command = f"hf download {REPO} --revision {REVISION} --include 'config.json'"
    words = (f"model '{REPO}' at revision '{REVISION}'", "cached revisions", command)
    assert [word for word in words if word not in message] == []


FILES = {"config.json": b"{}", "model.safetensors": bytes(5 << 20)}
REFUSALS = {
    "status 401 at commit": "HfHubHTTPError: Client error '401",
    "status 404 at commit": "HfHubHTTPError: Client error '404",
    "status 429 at commit": "HfHubHTTPError: 429 Too Many Requests",
    "status 500 at commit": "HfHubHTTPError: Server error '500",
    "status 503 at listing": "HfHubHTTPError: Server error '503",
    "portal at commit": "JSONDecodeError: Expecting value",
    "other at listing": "TypeError: string indices",
    "drops at commit": "RemoteProtocolError: Server disconnected",
}
SILENCES = (
    "hangs at commit",
    "hangs at listing",
    "hangs at file",
    "trickles at listing",
    "stalls at file",
    "status 500 at file",
    "drops at file",
)


@pytest.mark.parametrize(("mode", "why"), REFUSALS.items(), ids=REFUSALS)
def test_D03_hub_that_refuses_is_an_error_at_once(hub_server, mode, why):
    """What the hub says is in the error, which says what to do; no Retry-After is waited for."""
    hub_server(mode, FILES)
    started = time.monotonic()

    with pytest.raises(CheckpointError, match=f"cannot be used: {why}") as caught:
        checkpoint_from_source(STUDY_CHECKPOINT)

    assert_says_what_to_do(str(caught.value))
    assert time.monotonic() - started < START_S


@pytest.mark.parametrize("mode", SILENCES)
def test_D03_hub_that_falls_silent_is_an_error_within_seconds(hub_server, monkeypatch, mode):
    """The error comes STALLED_S after the last byte at most, whatever is retried meanwhile."""
    monkeypatch.setattr(hub, "STALLED_S", STALLED_S)
    hub_server(mode, FILES)
    started = time.monotonic()

    with pytest.raises(CheckpointError) as caught:
        checkpoint_from_source(STUDY_CHECKPOINT)

    assert re.search("used: (nothing arrived for 3 s|RemoteProtocolError|Hf)", str(caught.value))
    assert_says_what_to_do(str(caught.value))
    assert time.monotonic() - started < START_S + 2 * STALLED_S


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends it")
def test_D03_download_ends_with_the_run_that_asked(hub_server, tmp_path):
    """A run that is killed while a hub trickles leaves no process that waits for it."""
    asked = hub_server("trickles at listing")
    program = f"from gptneo_trt import hub; hub.folder_from_hub({REPO!r}, {REVISION!r}, ['*'])"
    environment = child_environment(HF_HUB_CACHE=str(tmp_path / "hub"))
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment) as run:
        while len(asked) < 2:
            assert run.poll() is None
            time.sleep(0.05)
        workers = psutil.Process(run.pid).children()
        run.kill()

    _, alive = psutil.wait_procs(workers, timeout=10)
    assert (len(workers), alive) == (1, [])


def test_D03_hub_that_is_not_there(hub_server, monkeypatch):
    """A refused connection and a name that nobody knows are errors of the same kind."""
    for endpoint in ("http://127.0.0.1:1", "http://hub.invalid"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(CheckpointError, match=r"cannot be used: Connect(Error|Timeout)|nothin"):
            checkpoint_from_source(STUDY_CHECKPOINT)


def test_D03_waiting_for_a_hub_takes_seconds():
    """The bound that the other tests shorten."""
    assert hub.STALLED_S <= 15


@pytest.fixture
def tiny_files(tmp_path):
    """Return file name -> content of T0."""
    folder = write_folder(tmp_path / "t0", tiny_checkpoint().weights)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_D03_downloaded_commit_is_used_offline_afterwards(hub_server, tiny_files, monkeypatch):
    """A hub that answers fills the cache; then the same commit needs no hub, and no question."""
    asked = hub_server("well", tiny_files | {"pytorch_model.bin": b"pickle"})

    online = checkpoint_from_source(STUDY_CHECKPOINT)
    questions = list(asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = checkpoint_from_source(STUDY_CHECKPOINT)

    assert online.sha256 == offline.sha256 == tiny_checkpoint().sha256
    assert (offline.name, offline.revision) == (REPO, REVISION)
    assert asked == questions
    assert not [question for question in questions if "pytorch_model.bin" in question]


def test_D03_filled_cache_asks_nothing_also_online(hub_server, tiny_files):
    """The cache comes first: a hub that would hang is not asked for what is there."""
    hub_server("well", tiny_files)
    checkpoint_from_source(STUDY_CHECKPOINT)
    asked = hub_server("hangs at commit")

    assert checkpoint_from_source(STUDY_CHECKPOINT).sha256 == tiny_checkpoint().sha256
    assert asked == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_D03_download_that_was_cut_short_is_not_used(hub_server, tiny_files, monkeypatch, name):
    """A snapshot that lacks a file is offline an error with the command; online it is mended."""
    hub_server("well", tiny_files)
    whole = checkpoint_from_source(STUDY_CHECKPOINT)
    snapshot = next(Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*"))
    (snapshot / name).unlink()

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError) as caught:
        checkpoint_from_source(STUDY_CHECKPOINT)
    assert_says_what_to_do(str(caught.value))

    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert checkpoint_from_source(STUDY_CHECKPOINT).sha256 == whole.sha256


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_D03_partial_snapshot_without_a_listing(hub_server, tiny_files, monkeypatch, name):
    """So is one that an older huggingface_hub left, which kept no list of what belongs to it."""
    folder = Path(constants.HF_HUB_CACHE) / ("models--" + REPO.replace("/", "--"))
    snapshot = folder / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for other in tiny_files.keys() - {name}:
        (snapshot / other).write_bytes(tiny_files[other])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    with pytest.raises(CheckpointError) as caught:
        checkpoint_from_source(STUDY_CHECKPOINT)

    assert name in str(caught.value)
    assert_says_what_to_do(str(caught.value))


def test_D03_slow_download_is_let_be(hub_server, monkeypatch):
    """A hub that keeps sending is waited for, longer than one that falls silent."""
    monkeypatch.setattr(hub, "STALLED_S", STALLED_S)
    large = os.urandom(4 << 20)
    real = Hub.reply

    def slowly(self, status, content):
        if self.command != "GET" or content != large:
            return real(self, status, content)
        self.head(len(content), status, ETag=f'"{hashlib.sha1(content).hexdigest()}"')
        for at in range(0, len(content), 1 << 20):
            self.ended.wait(STALLED_S / 2)
            self.wfile.write(content[at : at + (1 << 20)])
        return None

    monkeypatch.setattr(Hub, "reply", slowly)
    hub_server("well", {"slow.bin": large})
    started = time.monotonic()

    folder = hub.folder_from_hub(REPO, REVISION, ["slow.bin"])

    assert time.monotonic() - started > 1.5 * STALLED_S
    assert (folder / "slow.bin").read_bytes() == large


def test_D03_commit_without_these_files(hub_server):
    """A commit that has none of the files wanted is an error too."""
    hub_server("well", {"README.md": b"nothing here"})

    with pytest.raises(CheckpointError, match="cannot be used: ") as caught:
        checkpoint_from_source(STUDY_CHECKPOINT)
    assert_says_what_to_do(str(caught.value))
