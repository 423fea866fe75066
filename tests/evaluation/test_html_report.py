import base64
import io
import json
import re
from html.parser import HTMLParser

import matplotlib as mpl
import numpy as np
import pytest
import torch

from flt_mol import Structures
from flt_mol.evaluation.collecting import SplitResult
from flt_mol.evaluation.drawing import system_png
from flt_mol.evaluation.html_report import html_report, write_html
from flt_mol.evaluation.metrics import metrics_of
from flt_mol.evaluation.page import Markup, element, page
from flt_mol.evaluation.summary import summarise

EVIL = '<script>alert("1")</script>&\x1b\udce9'
VOID = ("img", "meta", "br")


def system(sid):
    return Structures.single(
        [29, 29, 6, 8], [[0, 0, 0], [2, 0, 0], [0, 0, 2], [0, 0, 3.1]], tags=[0, 1, 2, 2],
        cell=torch.diag(torch.tensor([4.0, 2.0, 9.0])), pbc=True, sid=sid,
    )  # fmt: skip


def result(size, sids, seed, **more):
    rng = np.random.default_rng(seed)
    target = rng.normal(size=size)
    prediction = target + rng.normal(0.02, 0.3, size)
    return SplitResult(sids, prediction, target, metrics_of(prediction, target), **more)


@pytest.fixture(scope="module")
def made():
    further = {"displacement": 0.25, "displacement_unmoved": 0.5, "displacement_atoms": 3}
    results = {
        "val_id": result(
            30, tuple(range(30)), 0, path="data/a.lmdb", unseen=("Fe",), further=further,
            columns={
                "natoms": (4,) * 30, "adsorbate": ("CO",) * 29 + (None,),
                "elements": ("C Cu O",) * 30, "facet": ("111", "100") * 15,
            },
            worst=tuple(system(i) for i in range(30)),
        ),
        EVIL: result(3, ("x", EVIL, "z"), 1, unfixed=True, columns={"adsorbate": ("H", EVIL, "H")}),
    }  # fmt: skip
    baselines = {"constant": {"val_id": 0.75}}
    summary = summarise(results, baselines, checkpoint=EVIL, left_out={"val_id": 2})
    # Through JSON, as whoever compares the two files would have it.
    return json.loads(json.dumps(summary)), results, html_report(summary, results)


class Reader(HTMLParser):
    """Tags, attributes and the texts of <data>."""

    def __init__(self, text):
        super().__init__()
        self.open, self.numbers, self.tags = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "data":
            self.numbers.append([dict(attributes), ""])

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] == "data":
            self.numbers[-1][1] += text


def test_every_number_is_that_of_the_json(made):
    summary, _, text = made
    numbers = Reader(text).numbers
    places = set()
    for attributes, shown in numbers:
        place = json.loads(attributes["data-of"])
        value = summary
        for key in place:
            value = value[key]
        assert float(attributes["value"]) == value
        percent = 100 if "ewt" in str(place) else 1
        digits = len(shown.partition(".")[2])
        assert shown == f"{percent * value:.{digits}f}"
        places.add(tuple(place))
    for at in (("splits", "val_id"), ("splits", summary_name(summary)), ("all",)):
        for name in ("count", "mae", "ewt", "rmse", "me", "median_ae"):
            assert (*at, name) in places
        for name in ("mae", "ewt", "rmse", "me", "median_ae"):
            assert {(*at, "intervals", name, 0), (*at, "intervals", name, 1)} <= places
    assert ("baselines", "constant", "val_id") in places
    assert ("splits", "val_id", "further", "displacement") in places
    for kind in ("adsorbate", "element", "size", "facet"):
        assert ("all", "breakdowns", kind, 0, "mae") in places
        assert ("splits", "val_id", "breakdowns", kind, 0, "mae") in places
    assert {("worst", 19, what) for what in ("prediction", "target", "error")} <= places
    assert ("worst", 20, "error") not in places


def summary_name(summary):
    return next(name for name in summary["splits"] if name != "val_id")


def test_nothing_is_fetched_and_nothing_runs(made):
    reader = Reader(made[2])
    assert not reader.open
    tags = {tag for tag, _ in reader.tags}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in reader.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                assert value.startswith(("data:image/png;base64,", "#")), value[:80]
    style = "".join(re.findall(r"<style.*?</style>", made[2], flags=re.DOTALL))
    assert "@import" not in style
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", made[2]))
    contents = [attributes.get("content", "") for tag, attributes in reader.tags if tag == "meta"]
    assert contents[1].startswith("default-src 'none'; img-src data:;")
    assert "width=device-width" in contents[2]


def test_texts_are_escaped(made):
    assert "<script" not in made[2]
    assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;\\x1b\\udce9" in made[2]
    made[2].encode("utf-8")


def test_pictures_are_described_and_names_are_unique(made):
    reader = Reader(made[2])
    images = [attributes for tag, attributes in reader.tags if tag == "img"]
    drawn = [w for w in made[0]["worst"] if w["split"] == "val_id"]
    assert len(images) == len(drawn) > 15
    assert images[0]["alt"].startswith(f"System sid {drawn[0]['sid']} of val_id; adsorbate CO")
    for attributes in images:
        png = base64.b64decode(attributes["src"].partition(",")[2])
        assert png[:8] == b"\x89PNG\r\n\x1a\n"
    plots = [attributes for tag, attributes in reader.tags if tag == "svg"]
    assert len(plots) == 5
    assert all(plot["role"] == "img" and plot["aria-label"] for plot in plots)
    assert all("width" not in plot for plot in plots)
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', made[2])
    assert {a or b for a, b in used} <= set(ids)
    assert dict(reader.tags)["html"] == {"lang": "en"}


def test_warnings_are_shown(made):
    assert "never trained on: Fe" in made[2]
    assert "no atom is fixed in &lt;script" in made[2]
    assert "val_id: 2 bad records were left out" in made[2]


def test_the_same_again_and_no_setting_changed(made, tmp_path):
    before = dict(mpl.rcParams)
    path = write_html(made[0], made[1], tmp_path / "r" / "report.html")
    assert dict(mpl.rcParams) == before
    again = path.read_text(encoding="utf-8")
    assert re.sub(r"base64,[^\"]*", "", again) == re.sub(r"base64,[^\"]*", "", made[2])


def test_one_split_of_predictions_alone():
    results = {"only": result(1, ("a",), 0)}
    text = html_report(summarise(results, predictions="p.csv"), results)
    assert "<title>Evaluation of p.csv</title>" in text
    assert "Where errors are large" not in text
    assert "<img" not in text
    assert "The 1 largest error" in text


def test_many_systems_stay_a_small_page():
    results = {"val_id": result(20_000, tuple(range(20_000)), 0)}
    assert len(html_report(summarise(results), results)) < 500_000


def test_elements():
    assert element("p", "<", Markup("<br>"), data_of='"') == '<p data-of="&quot;">&lt;<br></p>'
    assert element("img", src="a", alt="") == '<img src="a" alt="">'
    assert page("a & b").count("a &amp; b") == 1


def pixels(structure):
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(system_png(structure))).convert("RGBA")).astype(int)


def near(image, colour):
    return (np.abs(image[..., :3] - colour).max(-1) < 12) & (image[..., 3] > 250)


def test_drawings_show_elements_adsorbate_and_nothing_behind():
    image = pixels(system("a"))
    assert image[0, 0, 3] == 0  # transparent
    copper, oxygen, ring = (200, 128, 51), (255, 13, 13), (230, 0, 126)
    assert near(image, copper).sum() > 500
    half = image.shape[1] // 2
    for view in (image[:290, :half], image[:290, half:]):  # without the legend
        assert near(view, oxygen).sum() > 50
    assert near(image, ring).sum() > 50
    bare = Structures.single([29, 29], [[0, 0, 0], [2, 0, 0]], tags=[0, 1], cell=4 * torch.eye(3))
    assert near(pixels(bare), ring).sum() == 0
    # From above oxygen covers carbon; from the side both are seen.
    grey = (144, 144, 144)
    top, side = near(image[:200, :half], grey).sum(), near(image[:200, half:], grey).sum()
    assert top < 0.2 * side
    assert pixels(Structures.single([], torch.zeros(0, 3))).shape == image.shape
