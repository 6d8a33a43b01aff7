"""Reports name no user, no folder outside the root, and no host, wherever a text comes from."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from reports_made import LOSSES, SESSION, broken, many, one_of_each

from pytest_cka_memory.core import places
from pytest_cka_memory.core.allocations import FramesSite, format_frame
from pytest_cka_memory.core.report import Report, anonymous
from pytest_cka_memory.core.retention import Holding, Link
from pytest_cka_memory.core.verdicts import Unjudged
from pytest_cka_memory.reports import markdown, tables
from pytest_cka_memory.reports.html import page
from pytest_cka_memory.stored import json_report

ROOT = Path("/home/alice/project")
STDLIB = places._STANDARD_LIBRARY
SECRET = (
    "open('/home/alice/other/data.pt') in /home/alice/project/net.py, ~ /home/alice, "
    "file:///Users/alice/x.pt at:/scratch/alice/run.log ../../alice/y.py on gpu-7.corp.example "
    "C:\\Users\\alice\\z.pt (gpu-7)"
)
"""A text with everything that must not be in a report."""


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """The machine of alice; what is derived from its names is computed again."""
    monkeypatch.setenv("USER", "alice")
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(places.platform, "node", lambda: "gpu-7.corp.example")
    places.anonymizer.cache_clear()
    yield
    places.anonymizer.cache_clear()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/alice/project/tests/test_net.py", "tests/test_net.py"),
        ("/home/alice/project", "."),
        ("tests/test_net.py", "tests/test_net.py"),
        ("/home/alice/projects/net.py", "…/net.py"),
        ("../other/net.py", "…/net.py"),
        ("/home/alice/project/.venv/lib/python3.11/site-packages/timm/models/vit.py",
         "site-packages/timm/models/vit.py"),
        ("/usr/lib/python3/dist-packages/six.py", "dist-packages/six.py"),
        (f"{STDLIB}/threading.py", "<python>/threading.py"),
        (STDLIB, "<python>"),
        ("/home/alice", "~"),
        ("/Users/bob", "~"),
        ("/tmp/pytest-of-alice", "…"),
        ("/tmp/pytest-of-alice/pytest-0/data.pt", "…/data.pt"),
    ],
)  # fmt: skip
def test_path_keeps_what_is_the_same_on_every_machine(path, name):
    """A path is relative to the root, site-packages or Python's library, or is a name only."""
    assert places.named(path, ROOT) == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("tests/unit/test_net.py", "tests/unit/test_net.py"),
        ("shop/models/vision/layers/attention.py", "shop/models/vision/layers/attention.py"),
        ("train.py", "train.py"),
        (".venv/lib/python3.11/site-packages/timm/models/vision/vit.py", "timm/…/vit.py"),
        (".venv/lib/python3.11/site-packages/timm/vit.py", "timm/vit.py"),
        (".venv/lib/python3.11/site-packages/six.py", "six.py"),
        ("/home/alice/train.py", "…/train.py"),
        (f"{STDLIB}/concurrent/futures/thread.py", "<python>/thread.py"),
        ("<string>", "<string>"),
    ],
)
def test_frame_names_its_file_from_the_root_on(path, name):
    """A frame has its path from the root on, so an editor opens it; a library's is its name and
    file.
    """
    file = path if path.startswith("<") else str(ROOT / path)
    with places.root(ROOT):
        assert format_frame(file, 12, "step") == f"{name}:12 in step"


def test_frames_are_relative_to_the_root_of_their_session():
    """A session inside another one has a root of its own; outside pytest the last folder stays."""
    code = compile("pass", "/home/alice/project/a/b/net.py", "exec")
    site = FramesSite(((code, 0),))
    with places.root(ROOT):
        with places.root(ROOT / "a" / "b"):
            assert site.readable().frames == ("net.py:1 in <module>",)
        assert site.readable().frames == ("a/b/net.py:1 in <module>",)
    places_before, places._roots[:] = list(places._roots), []
    try:
        assert format_frame("/home/alice/net.py", 1, "f") == "alice/net.py:1 in f"
    finally:
        places._roots[:] = places_before
        places.short.cache_clear()


def test_file_outside_the_root_is_named_from_its_package_on(tmp_path):
    """A file outside the root is named from its package on, as if
    installed; others by their name.
    """
    inner = tmp_path / "shop" / "models"
    inner.mkdir(parents=True)
    for file in (inner.parent / "__init__.py", inner / "__init__.py", inner / "net.py"):
        file.write_text("", "utf-8")
    with places.root(ROOT):
        assert places.short(str(inner / "net.py")) == "shop/models/net.py"
        assert places.short(str(inner.parent / "setup" / "net.py")) == "…/net.py"


@pytest.mark.parametrize(
    "text",
    [
        "t.py::test_route[/api/v1/users]",
        "https://example.org/home/page",
        "rise of growth/b, and/or 3 / 4",
        "tests/test_net.py::test_it[a/b]",
        "CACHE['model/encoder.layers.2']",
        "gpu-70 and my-gpu-7",
    ],
)
def test_other_text_is_left_alone(text):
    """When secrets are replaced, routes, links, relative paths and other hosts stay as they are."""
    assert places.anonymizer(ROOT)(text) == text


def test_paths_and_hosts_in_a_text_are_replaced():
    """Paths and hosts are replaced in a text, also in quotes, after colons, and on Windows."""
    assert places.anonymizer(ROOT)(SECRET) == (
        "open('…/data.pt') in net.py, ~ ~, …/x.pt at:…/run.log …/y.py on <host> …/z.pt (<host>)"
    )


@pytest.mark.parametrize(
    ("address", "text", "shown"),
    [
        ("node-3.cluster", "the store at node-3.cluster:29500", "the store at <host>:29500"),
        ("node-3.cluster", "on node-3", "on <host>"),
        ("192.168.0.7", "at 192.168.0.7:29500", "at <host>:29500"),
        ("127.0.0.1", "at 127.0.0.1:29500", "at 127.0.0.1:29500"),
        ("localhost", "at localhost", "at localhost"),
    ],
)
def test_first_host_of_torchrun_is_replaced(monkeypatch, address, text, shown):
    """A rank that cannot reach the store names torchrun's first host, which is replaced."""
    monkeypatch.setenv("MASTER_ADDR", address)
    assert places.anonymizer(ROOT)(text) == shown


def test_root_with_a_space_is_replaced():
    """A root with a space is replaced, although paths in a text end at a space otherwise."""
    root = Path("/home/alice/my project")
    assert places.anonymizer(root)("made at /home/alice/my project/net.py:1") == "made at net.py:1"


def secret_report() -> Report:
    """A report in which every text that a test or the machine can set is `SECRET`."""
    texts = {f.name: SECRET for f in fields(Holding) if f.type in ("str | None", str | None)}
    holding = replace(LOSSES, **texts, created_at=(SECRET, SECRET))
    holding = replace(holding, paths=((Link(SECRET, SECRET),),))
    assert {"held_by", "code", "hint", "operator"} <= set(texts)
    bad = broken(SECRET, SECRET)
    bad = replace(
        bad,
        record=replace(bad.record, retained=(holding,), grown=(holding,), at_peak=(holding,)),
        breaches=tuple(replace(b, limit=SECRET, message=SECRET) for b in bad.breaches),
        unjudged=(Unjudged(SECRET, SECRET),),
        limits=(SECRET,),
        worker=SECRET,
        extra={SECRET: [SECRET, {"path": SECRET}]},
    )
    session = {**SESSION, "device_name": SECRET, "meter": SECRET, "notes": [SECRET]}
    return Report(
        session, (bad,), (SECRET,), {SECRET: 1}, problems=(SECRET,), locations={SECRET: ("t.py", 1)}
    )


RENDERERS = {
    "json": json_report.render,
    "html": page.render,
    "markdown": markdown.render,
    "github": lambda report: "\n".join(markdown.annotations(report, lambda file: file)),
    "summary": lambda report: markdown.render(report, markdown.JOB_SUMMARY_CHARACTERS),
}


@pytest.mark.parametrize("name", RENDERERS)
def test_no_report_names_user_host_or_folder(name):
    """No report names user, host or folder; the same text without
    :func:`anonymous` has all three.
    """
    words = ("alice", "gpu-7", "corp", "/home", "Users", "/scratch")
    raw = RENDERERS[name](secret_report())
    assert all(word in raw for word in words[:3])
    text = RENDERERS[name](anonymous(secret_report(), ROOT))
    assert [word for word in words if word in text] == []
    assert "data.pt" in text


def test_properties_of_junit_name_no_folder():
    """The names of JUnit properties contain labels, and name no folder."""
    properties = tables.properties_of(secret_report().results, SESSION, ROOT)
    assert all("alice" not in name and "gpu-7" not in name for name, _ in properties)
    assert any("data.pt" in name for name, _ in properties)


def test_report_without_secrets_is_not_changed():
    """A report without secrets keeps its figures, timelines and the places of its tests' files."""
    report = replace(one_of_each(), locations={"t.py::test_kept": ("t.py", 3)})
    assert anonymous(report, ROOT) == report
    large = many(50)
    assert json_report.render(anonymous(large, ROOT)) == json_report.render(large)


def test_reasons_that_become_equal_are_counted_together():
    """Two reasons that differ in a folder only become equal, and are counted together."""
    report = replace(one_of_each(), unmeasured={"/home/alice/a/x.py": 2, "/home/alice/b/x.py": 3})
    assert anonymous(report, ROOT).unmeasured == {"…/x.py": 5}


def test_values_of_other_plugins_keep_their_types():
    """Values that other plugins add keep their types, and only their texts are changed."""
    extra = {"n": 1, "none": None, "list": ["/home/alice/x", 2.5], "on": True}
    report = replace(one_of_each(), results=(replace(broken(), extra=extra),))
    (region,) = json.loads(json_report.render(anonymous(report, ROOT)))["regions"]
    assert region["extra"] == {"n": 1, "none": None, "list": ["…/x", 2.5], "on": True}
