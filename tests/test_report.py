"""The page is parsed as a browser would, and opened in one where there is one."""

import base64
import io
import math
import os
from dataclasses import replace
from html.parser import HTMLParser
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab import report
from vitlab.data import sources
from vitlab.data.decode import Unreadable
from vitlab.evaluation.metrics import count, wilson
from vitlab.evaluation.scoring import Scores

CHROMIUM = "/usr/bin/chromium"
HOSTILE = """<script>alert(1)</script>"'><img src=x onerror=alert(1)>&amp;"""
VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """Tags with their attributes, visible text, and tables by label as rows of cells."""

    def __init__(self, html):
        super().__init__()
        self.html, self.tags, self.text, self.tables = html, [], "", {}
        self.open, self.rows = [], []
        self.feed(html)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if attributes.get("role") == "region":
            self.rows = self.tables[attributes["aria-label"]] = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.text += data
        if {"th", "td"} & set(self.open):
            self.rows[-1][-1] += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def lines(self):
        """Points of the curves by style, chart after chart."""
        return [
            (p["class"], [tuple(map(float, xy.split(","))) for xy in p["points"].split()])
            for p in self.all("polyline")
        ]


@pytest.fixture
def page(tmp_path):
    def write(metrics, title="A title", **parts):
        report.write(tmp_path / "report.html", title=title, metrics=metrics, **parts)
        return Page((tmp_path / "report.html").read_text(encoding="utf-8"))

    return write


def scored(k, n=400, names=None, skipped=0, seed=0):
    """Metrics of a fair classifier."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, k, n)
    logits = rng.gumbel(size=(n, k)).astype(np.float32)
    logits[np.arange(n), labels] += 2
    classes = tuple(names or (f"class {i}" for i in range(k)))
    return count(logits, labels, classes, "photos/ test", skipped)


def from_confusion(confusion, names=None):
    """Metrics with exactly these counts."""
    confusion = np.array(confusion)
    labels, predicted = (np.repeat(i, confusion.ravel()) for i in np.indices(confusion.shape)
                         .reshape(2, -1))  # fmt: skip
    classes = tuple(names or "abcdefghijkl"[: len(confusion)])
    logits = np.eye(len(confusion), dtype=np.float32)[predicted]
    return count(logits, labels, classes, "photos/ test", 0)


def train(epoch, loss, lr=0.1):
    return {"kind": "train", "step": 1, "epoch": epoch, "loss": loss, "lr": lr, "grad_norm": 1.0,
            "images_per_second": 9.0, "seconds": 1.0}  # fmt: skip


def scores(epoch, loss, top1, weights="last"):
    return {"kind": "eval", "step": 1, "epoch": epoch, "weights": weights, "loss": loss,
            "top1": top1, "top5": None, "n": 9}  # fmt: skip


def mistake(image, id="photos/a.jpg", truth="cat", predicted="dog", probability=0.987):
    return report.Mistake(
        image=image, id=id, truth=truth, predicted=predicted, probability=probability
    )


def picture(uri):
    kind, _, data = uri.partition(";base64,")
    assert kind in ("data:image/png", "data:image/jpeg")
    return Image.open(io.BytesIO(base64.b64decode(data, validate=True)))


def test_headline(page):
    metrics = scored(12, skipped=1234)
    text = page(metrics).text
    low, high = metrics.top1_interval
    for shown in (
        f"{metrics.top1:.2%} accuracy", f"{low:.2%} to {high:.2%}", f"{metrics.top5:.2%}",
        f"{metrics.confusion.trace()} of 400", "photos/ test", f"{metrics.loss:.4f}", "1,234",
    ):  # fmt: skip
        assert shown in text
    assert "Warning" not in text
    assert "Top-5" not in page(scored(2)).text


@pytest.mark.parametrize("k", [2, 12])
def test_confusion_matrix(page, k):
    metrics = scored(k)
    rows = page(metrics).tables["Confusion matrix"]
    assert rows[0] == ["", *metrics.classes]
    assert [row[0] for row in rows[1:]] == list(metrics.classes)
    assert [[int(n) for n in row[1:]] for row in rows[1:]] == metrics.confusion.tolist()


def test_confusion_tints(page):
    cells = page(from_confusion([[9, 1, 0], [0, 4, 4], [0, 0, 0]])).all("td")[:9]
    assert ["right" in c["class"] for c in cells] == np.eye(3, dtype=bool).ravel().tolist()
    tints = [float(c["style"].removeprefix("--a:")) for c in cells]
    assert tints[0] > tints[4] == tints[5] > tints[1] > 0  # shares of the row, not counts
    assert tints[2] == tints[6] == tints[8] == 0


def test_many_classes(page):
    confusion = np.diag(np.full(200, 5))
    confusion[7, 130], confusion[199, 0], confusion[3, 4] = 3, 2, 1
    shown = page(from_confusion(confusion, [f"class {i}" for i in range(200)]))
    assert "Confusion matrix" not in shown.tables
    assert shown.tables["Confusions"][1:] == [
        ["class 7", "class 130", "3", "37.5%"], ["class 199", "class 0", "2", "28.6%"],
        ["class 3", "class 4", "1", "16.7%"],
    ]  # fmt: skip
    image = np.asarray(picture(shown.all("img")[0]["src"]))
    assert image.shape == (200, 200)
    assert (image < 255).sum() == 203
    assert image[5, 5] < image[7, 130] < 255 == image[130, 7]
    assert len(shown.tables["Classes"]) == 201


def test_most_frequent_only(page):
    assert len(page(scored(40, n=4000)).tables["Confusions"]) == 1 + report.WIDE


def test_classes(page):
    # c has no pictures; nothing is called d
    rows = page(from_confusion([[8, 2, 0, 0], [1, 5, 4, 0], [0] * 4, [1, 0, 0, 0]]))
    rows = rows.tables["Classes"]

    def share(part, whole):
        low, high = wilson(part, whole)
        return f"{part / whole:.1%} {100 * low:.1f}\u2013{high:.1%}"

    assert rows == [
        ["Class", "Pictures", "Precision", "Recall"],
        ["a", "10", share(8, 10), share(8, 10)],
        ["b", "10", share(5, 7), share(5, 10)],
        ["c", "0", share(0, 4), "n/a"],
        ["d", "1", "n/a", share(0, 1)],
    ]


@pytest.mark.parametrize("confusion", [[[0, 3], [0, 97]], [[0, 5], [0, 0]], [[0, 0], [0, 5]]])
def test_warns_of_one_class(page, confusion):
    shown = page(from_confusion(confusion, ("cat", "dog")))
    assert "Warning: all predictions fall into “dog”" in shown.text


def test_leaves_out_what_is_empty(page):
    shown = page(scored(3))
    assert "Training" not in shown.text
    assert "Worst" not in shown.text
    assert "Skipped" not in shown.text
    assert "Settings" not in shown.text
    assert not shown.all("svg") + shown.all("img")
    assert len(shown.all("h1")) == 1
    assert len(shown.all("h2")) == 2


def test_curves(page):
    history = [
        train(0.5, 2.0, 0.1), train(1, 1.0, 0.2), scores(1, 1.5, 0.5),
        scores(1, 1.25, 0.6, "ema"), train(2, 0.5, 0), scores(2, 1.0, 0.75),
        scores(2, 0.75, 0.8, "ema"),
    ]  # fmt: skip
    shown = page(scored(3), history=history)
    names = [name for name, _ in shown.lines()]
    loss, accuracy = ["train", "validation last", "validation ema"], names[3:5]
    assert names[:3] == loss
    assert accuracy == loss[1:]
    assert names[5:] == ["train"]
    for (_, points), values in zip(shown.lines(), (
        [2, 1, 0.5], [1.5, 1], [1.25, 0.75], [0.5, 0.75], [0.6, 0.8], [0.1, 0.2, 0],
    ), strict=True):  # fmt: skip
        x, y = np.array(points[1:]).T  # the first stands twice
        assert (np.diff(x) > 0).all()
        assert np.sign(np.diff(y)).tolist() == (-np.sign(np.diff(values))).tolist()  # y points down
        assert x.max() == 350
        assert 0 <= y.min() <= y.max() <= 170
    assert {"Loss", "Accuracy, %", "Learning rate"} <= {
        a["aria-label"].removesuffix(" over epochs") for a in shown.all("svg")
    }
    assert "Not drawn" not in shown.text


def test_axis_labels_fit_the_data(page):
    shown = page(scored(3), history=[scores(0, 2.0, 0.5), scores(4.2, 1.0, 0.9)])
    for number in ("1", "1.25", "2", "50", "90", "4"):
        assert f"<text>{number}</text>" in shown.html
    places = [a["transform"].removeprefix("translate(") for a in shown.all("g")]
    assert max(float(place.split(",")[0]) for place in places) < 350


@pytest.mark.parametrize(("low", "high"), [
    (0, 0), (1, 1), (0.5, 0.5), (0, 1), (0.1, 0.30001), (-3, 7), (1e-5, 3e-5), (99.9, 100),
    (1e90, 2e90), (0, 1e-30), (5e99, 5e99), (-2, -2),
])  # fmt: skip
def test_ticks(low, high):
    ticks = report._ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low <= high <= ticks[-1] or math.isclose(ticks[0], low)
    assert len({f"{t:.6g}" for t in ticks}) == len(ticks)


def test_long_history_is_averaged(page):
    history = [train(i / 1000, i % 2) for i in range(10_000)]
    (_, points), _ = page(scored(2), history=history).lines()
    assert len(points) == 301
    assert np.ptp([y for _, y in points]) < 10  # the zigzag is gone


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, None])
def test_values_that_are_no_numbers(page, value):
    history = [train(1, value, value), train(2, 1.0), scores(2, value, value), train(value, 1.0)]
    metrics = replace(scored(7), loss=math.nan if value is None else value)
    pixels = np.zeros((8, 8, 3), np.uint8)
    found = [mistake(pixels, probability=math.nan)]
    shown = page(metrics, history=history, settings={"lr": value}, mistakes=found)
    assert "Not drawn: 2 points" in shown.text
    assert "Loss" + "n/a" in shown.text.replace("\n", "")
    assert "dog n/a" in shown.text
    assert [name for name, _ in shown.lines()] == ["train", "train"]
    assert np.isfinite([points for _, points in shown.lines()]).all()


def test_history_without_any_number(page):
    shown = page(scored(2), history=[train(1, math.nan, math.nan)])
    assert not shown.all("svg")
    assert "Not drawn: 1 points" in shown.text


def test_single_points_at_zero(page):
    shown = page(scored(2), history=[train(0, 0, 0), scores(0, 0, 0)])
    assert len(shown.lines()) == 4
    assert all(a == b for _, (a, b) in shown.lines())


def test_nothing_users_write_is_markup(page):
    image = np.zeros((4, 4, 3), np.uint8)
    parts = {
        "title": HOSTILE, "settings": {HOSTILE: HOSTILE, "data": {HOSTILE: [HOSTILE]}},
        "mistakes": [mistake(image, HOSTILE, HOSTILE, HOSTILE)], "skipped": [(HOSTILE, HOSTILE)],
        "history": [scores(1, 1.0, 0.5, HOSTILE)],
    }  # fmt: skip
    for k in (2, 40):
        names = [f"{HOSTILE}{i}" for i in range(k)]
        metrics = replace(scored(k, 2000, names), scored_on=HOSTILE)
        shown = page(metrics, **parts)
        assert not shown.all("script")
        assert not [a for _, a in shown.tags if any(name.startswith("on") for name in a)]
        assert len(shown.all("img")) == (1 if k == 2 else 2)
        assert shown.text.count(HOSTILE) > 2 * k
    one = page(from_confusion([[0, 1], [0, 1]], ("a", HOSTILE)))
    assert f"“{HOSTILE}”" in one.text


def test_asks_nobody_for_anything(page):
    found = [mistake(np.zeros((9, 9, 3), np.uint8)), mistake(np.zeros((99, 99, 3), np.uint8))]
    for k in (2, 40):
        shown = page(scored(k), history=[train(1, 1.0)], mistakes=found)
        addresses = [a[key] for _, a in shown.tags for key in ("src", "href", "srcset") if key in a]
        assert addresses
        assert all(a.startswith("data:") for a in addresses)
        assert "://" not in shown.html
        assert "url(" not in shown.html
        assert "@import" not in shown.html
        policy = next(a for a in shown.all("meta") if "http-equiv" in a)["content"]
        assert "default-src 'none'" in policy


def test_is_readable_for_everyone(page):
    found = [mistake(np.zeros((9, 9, 3), np.uint8))]
    shown = page(scored(40), mistakes=found, history=[train(1, 1.0)])
    assert shown.all("html")[0]["lang"] == "en"
    assert any(a.get("name") == "viewport" for a in shown.all("meta"))
    assert all(a["alt"] for a in shown.all("img"))
    assert all(a["aria-label"] for a in shown.all("svg"))
    assert "prefers-color-scheme: dark" in shown.html


def test_pictures(page):
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (28, 20, 3), dtype=np.uint8)
    large = rng.integers(0, 256, (300, 600, 3), dtype=np.uint8)
    thin = rng.integers(0, 256, (2, 5000, 3), dtype=np.uint8)
    shown = page(scored(2), mistakes=[mistake(i) for i in (small, large[:, ::-1], thin)])
    images = [picture(a["src"]) for a in shown.all("img")]
    assert (np.asarray(images[0]) == small).all()
    assert [i.size for i in images] == [(20, 28), (192, 96), (192, 1)]
    assert [a["class"] for a in shown.all("img")] == ["crisp", "smooth", "smooth"]
    assert "truth cat" in shown.text
    assert "predicted dog 98.7%" in shown.text
    assert "photos/a.jpg" in shown.text


def test_skipped_files(page):
    files = [(f"{i}.jpg", f"reason {i}") for i in range(150)]
    shown = page(scored(2), skipped=files)
    assert "Skipped files (150, the first 100 are listed)" in shown.text
    assert shown.tables["Skipped files"][1:] == [list(f) for f in files[:100]]
    assert "Skipped files (2)" in page(scored(2), skipped=files[:2]).text


def test_settings(page):
    settings = {"lr": 1, "flip": True, "crop": [0.5, 1.0], "data": {"seed": 0, "size": None}}
    assert page(scored(2), settings=settings).tables["Settings"][1:] == [
        ["lr", "1"], ["flip", "yes"], ["crop", "[0.5, 1.0]"], ["data.seed", "0"],
        ["data.size", "none"],
    ]  # fmt: skip


def test_names_that_are_not_text(page):
    name = os.fsdecode(b"caf\xe9.jpg")
    shown = page(scored(2, names=(name, "été")), skipped=[(name, "not an image")], title=name)
    assert "caf?.jpg" in shown.text
    assert "été" in shown.text


def test_version(page, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: f"1.2.3 of {name}")
    assert "Made by vitlab 1.2.3 of vitlab" in page(scored(2)).text

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert "Made by vitlab" in page(scored(2)).text


def test_replaces_the_file_whole(page, tmp_path):
    page(scored(3), title="the run before")
    assert "the run before" not in page(scored(3)).html
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


# Mistakes ----------------------------------------------------------------------------------------


def scored_source(probabilities, labels, rows=None):
    """A source of pictures, each filled with its row, and its scores."""
    probabilities = np.array(probabilities, np.float32)
    images = [np.full((2, 2, 3), i, np.uint8) for i in range(len(labels))]
    source = sources.from_arrays(images, list(labels), ("a", "b", "c"))
    rows = np.arange(len(labels)) if rows is None else np.array(rows)
    metrics = count(np.log(probabilities), source.labels[rows], ("a", "b", "c"), "arrays all", 0)
    return source, Scores(metrics=metrics, rows=rows, probabilities=probabilities, skipped=[])


ODDS = [[0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.5, 0.4, 0.1], [0.9, 0.099, 0.001]]


def test_mistakes_worst_first():
    source, result = scored_source(ODDS, "bcbaa")  # the last two are right
    found = report.mistakes(source, result)
    assert [(m.id, m.truth, m.predicted) for m in found] == [
        ("1", "c", "b"), ("2", "b", "c"), ("0", "b", "a"),
    ]  # fmt: skip
    assert [m.probability for m in found] == pytest.approx([0.8, 0.8, 0.6])
    assert [int(m.image[0, 0, 0]) for m in found] == [1, 2, 0]
    assert [m.id for m in report.mistakes(source, result, limit=2)] == ["1", "2"]
    assert report.mistakes(source, result, limit=0) == []


def test_mistakes_of_the_rows_that_were_scored():
    # rows out of order, as several processes leave them; row 0 was not scored
    source, result = scored_source(ODDS[1:4], "bbcba", rows=[3, 1, 2])
    found = report.mistakes(source, result)
    assert [(m.id, m.truth, m.predicted) for m in found] == [("1", "b", "c"), ("2", "c", "a")]


def test_mistakes_ties_by_row():
    source, result = scored_source([[0.2, 0.8, 0.0001]] * 4, "aaaa", rows=[2, 3, 0, 1])
    assert [m.id for m in report.mistakes(source, result)] == ["0", "1", "2", "3"]


def test_mistakes_match_classes_by_name():
    source, result = scored_source(ODDS, "bcbaa")
    order = replace(source, classes=("c", "b", "a"), labels=2 - source.labels)
    assert [m.truth for m in report.mistakes(order, result)] == ["c", "b", "b"]


@pytest.mark.parametrize("error", [Unreadable("truncated file"), FileNotFoundError("gone")])
def test_mistakes_that_cannot_be_loaded(error):
    source, result = scored_source(ODDS, "bcbaa")

    def load(i):
        if i == 1:
            raise error
        return source.load(i)

    found = report.mistakes(replace(source, load=load), result, limit=2)
    assert [m.id for m in found] == ["2", "0"]


def test_mistakes_with_nan_come_last():
    source, result = scored_source([[0.2, 0.7, 0.1], [0.2, 0.6, 0.2], [0.1, 0.8, 0.1]], "aca")
    result.probabilities[0] = math.nan
    result = replace(result, rows=np.array([1, 0, 2]))  # row 1, of class c, has NaN
    assert [m.id for m in report.mistakes(source, result)] == ["2", "0", "1"]


# In a browser ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    if not find_spec("playwright"):
        pytest.skip("playwright is not installed")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no {CHROMIUM}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.mark.parametrize("size", [(360, 800), (1280, 900)])
@pytest.mark.parametrize("k", [2, 12, 30, 200])
def test_in_a_browser(browser, page, tmp_path, k, size):
    rng = np.random.default_rng(0)
    long = "a_name_that_is_long_and_has_no_spaces_at_all_" * 3
    page(
        scored(k, names=[f"{long}{HOSTILE}{i}" for i in range(k)]), title=long,
        history=[train(e / 9, 2 - e / 50, 1e-5) for e in range(90)] + [scores(9, 0.4, 0.9)],
        settings={long: long, "model": "vit-nano8"}, skipped=[(long, long)],
        mistakes=[
            mistake(rng.integers(0, 256, (s, 2 * s, 3), dtype=np.uint8), f"{long}/{s}.jpg", long)
            for s in (28, 300)
        ],
    )  # fmt: skip
    tab = browser.new_page(viewport={"width": size[0], "height": size[1]})
    errors, requests = [], []
    tab.on("console", lambda message: errors.append(message.text))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    tab.on("dialog", lambda dialog: (errors.append(dialog.message), dialog.dismiss()))
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        tab.goto((tmp_path / "report.html").as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        score = tab.locator(".score strong")
        assert score.is_visible()
        box = score.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size[0]
        assert box["y"] + box["height"] <= size[1]
        light = "255, 255, 255" in tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert light == (scheme == "light")
        assert tab.evaluate(
            "[...document.images].every(i => i.complete && i.naturalWidth && i.width > 50)"
        )
    tab.close()
    assert not errors
    assert all(url.startswith(("file:", "data:")) for url in requests)
