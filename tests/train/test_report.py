"""The page of runs: what it draws, what it never loses, and who may ask its server."""

from __future__ import annotations

import gzip
import hashlib
import html
import http.client
import importlib.resources
import json
import math
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easypipe.cli import main
from easypipe.core.errors import StorageError
from easypipe.train.record import read_kept, write_kept, write_restart
from easypipe.train.report import numbers as numbers_module
from easypipe.train.report.numbers import MOST_POINTS, Curves, CurvesReader, flows, spikes, thinned
from easypipe.train.report.page import documents_of, page, write_report
from easypipe.train.report.serve import server
from page_cells import cells


def run(folder: Path, steps: int = 30, name: str = "run") -> Path:
    """The folder of a run with hostile names in it."""
    made = folder / name
    made.mkdir()
    lines = [{"step": i, "loss": 4 / i, "grad_norm": 1.0, "mfu": None} for i in range(1, steps + 1)]
    lines[-1]["eval"] = {
        "</script><b>held": {"loss": 0.5, "nll": 0.5, "ppl": 1.6, "num_targets": 9}
    }
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokens = {"stage": "tokenize", "dataset": "a", "unit": "tokens"}
    entries = [
        {**tokens, "in": {"encoded": 10}, "out": {"stored": 10}},
        {**tokens, "stage": "pack", "in": {"drawn": 8, "EOS": 1}, "out": {"placed": 9}},
    ]
    write_kept(made / "ledger.json", {"entries": entries, "facts": {}})
    dataset = {"name": "a", "requested": 1.0, "realised": 1.0, "drawn": 1, "epochs": 0.8}
    shares = [{"step": steps, "requested": {"a": 1.0}, "realised": {"a": 1.0}, "tokens": {"a": 9}}]
    plan = {"unit": "rows", "steps": steps, "datasets": [{**dataset, "tokens_placed": 9}]}
    write_kept(made / "plan.json", {**plan, "by_step": shares})
    changed = {"step": 9, "row": None, "changed": {"load.batch_size": "was 8, is 16"}}
    (made / "run.yaml").write_text("data: {datasets: [{name: a}]}  # für später")
    write_kept(made / "changes.json", [{**changed, "before": None}])
    write_restart(made, 9)
    return made


def numbers(text: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="numbers">(.*?)</script>', text)
    assert found is not None
    return json.loads(found[1])


def paragraphs(text: str) -> list[str]:
    """The sentences below and in place of tables."""
    return re.findall(r"<p(?: class=\"none\")?>(.*?)</p>", text[text.index('id="tables"') :])


def flow(links: Sequence[Any]) -> dict[tuple[str, str], int]:
    assert all(set(link) == {"source", "target", "value"} for link in links)
    return {(link["source"], link["target"]): link["value"] for link in links}


def test_the_library_is_the_published_file() -> None:
    folder = importlib.resources.files("easypipe.train.report") / "echarts"
    digest = hashlib.sha256(
        gzip.decompress((folder / "echarts.min.js.gz").read_bytes())
    ).hexdigest()
    assert digest in (folder / "README.md").read_text()


def test_what_the_page_draws_is_what_the_run_wrote(tmp_path: Path) -> None:
    (drawn,) = numbers(page([run(tmp_path)]))
    assert drawn["curves"]["loss"] == [
        [*range(1, 31)],
        [float(f"{4 / i:.6g}") for i in range(1, 31)],
    ]
    assert drawn["curves"]["eval/</script><b>held/loss"] == [[30], [0.5]]
    assert "mfu" not in drawn["curves"]
    assert [(mark["step"], mark["kind"]) for mark in drawn["marks"]] == [
        (9, "change"),
        (9, "restart"),
    ]
    assert drawn["config"] == str(tmp_path / "run" / "run.yaml")
    (spaced,) = numbers(page([run(tmp_path, name="a run")]))
    assert spaced["config"] == f"'{tmp_path / 'a run' / 'run.yaml'}'"
    assert drawn["marks"][0]["text"] == "load.batch_size: was 8, is 16"
    assert drawn["mixture"]["a"]["so far"] == [1.0]
    assert flow(drawn["flows"]) == {
        ("a: encoded", "tokenize a"): 10,
        ("tokenize a", "a: stored"): 10,
        ("a: stored", "a: drawn"): 8,
        ("a: stored", "a: not drawn"): 2,
        ("a: drawn", "pack a"): 8,
        ("a: EOS", "pack a"): 1,
        ("pack a", "a: placed"): 9,
    }


def test_the_page_shows_the_config_of_the_run(tmp_path: Path) -> None:
    made = run(tmp_path)
    config = (made / "run.yaml").read_text()
    assert config in page([made])
    (made / "run.yaml").unlink()
    assert "no run.yaml" in (without := page([made]))
    assert config not in without


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ("data: {datasets: [{name: a}]}", True),
        ("data: {datasets: [{data_files: x}]}", False),  # named dataset1
        ("data: {datasets: a}", False),
        ("data: [", False),
        ("- data", False),
    ],
)
def test_tokens_flow_without_a_plan_of_the_mixture(
    tmp_path: Path, record: str, found: bool
) -> None:
    """A run of one dataset writes none, and others write theirs at the end."""
    made = run(tmp_path)
    (made / "plan.json").unlink()
    (made / "run.yaml").write_text(record)
    (drawn,) = numbers(page([made]))
    assert bool(drawn["flows"]) == found


def test_every_cell_of_every_table_is_told(tmp_path: Path) -> None:
    made = run(tmp_path)
    lines = (made / "metrics.jsonl").read_text().splitlines()
    more = {"skipped": 2, "mfu": 0.25, "mfu_palm": 0.125, "peak_memory": 77}
    rates = [
        json.dumps(json.loads(line) | {"tokens_per_second": 2.0**i}) for i, line in enumerate(lines)
    ]
    rates[-1] = json.dumps(json.loads(rates[-1]) | more)
    (made / "metrics.jsonl").write_text("\n".join(rates) + "\n")
    for step in (9, 30):
        (made / "checkpoints" / str(step)).mkdir(parents=True)
    bests = [
        {"step": step, "loss": 1 / step, "checkpoint": f"checkpoints/{step}"} for step in (30, 8)
    ]
    write_kept(made / "best.json", bests)
    documents = [{"dataset": "a", "file": "a.txt", "row": 7}]
    undone = {"step": 6, "to": 4, "batch_of_step": 5, "documents": documents}
    (made / "rollbacks.jsonl").write_text(json.dumps(undone) + "\n")
    said = {"step": 3, "samples": [{"prompt": "<b>ask", "text": "answer"}]}
    (made / "samples.jsonl").write_text(json.dumps(said) + "\n")
    write_kept(made / "fingerprints.json", {"train": {"plan": "ab"}, "eval": {"held": None}})
    versions = [
        {"from_step": 0, "jax": "1", "python": "3"},
        {"from_step": 9, "jax": "2", "new": "4"},
    ]
    write_kept(made / "versions.json", versions)
    text = page([made])
    told = cells(text)
    begun = next(row[1] for row in told if re.fullmatch(r"20\d\d-.*:\d\d", row[-1]))
    assert told == [
        ["folder", str(made)],
        ["last step logged", "30"],
        ["loss at first, at last", "4, 0.13333"],
        ["steps skipped, not finite", "2"],
        ["tokens a second, median", "24,576.0"],
        ["MFU at last (exact; PaLM convention)", "0.25; 0.125"],
        ["peak memory of a device, bytes", "77"],
        ["checkpoints of steps", "9, 30"],
        ["step", "held out", "loss", "nll", "perplexity", "targets"],
        ["30", "</script><b>held", "0.5", "0.5", "1.6", "9"],
        ["step", "prompt", "what the model wrote"],
        ["3", "<b>ask", "answer"],
        ["step", "loss", "checkpoint"],
        ["30", "0.033333", "checkpoints/30"],
        ["8", "0.125", "checkpoints/8 (gone)"],
        ["at step", "back to", "skipped batch of step", "its documents"],
        ["6", "4", "5", "a a.txt row 7"],
        ["", "changed", ""],
        ["after step 9", "load.batch_size", "was 8, is 16"],
        ["", "begun again, UTC"],
        ["after step 9", begun],
        ["dataset", "asked for (rows)", "drawn", "documents", "epochs", "tokens"],
        ["a", "1", "1", "1", "0.8", "9"],
        ["stage", "dataset", "unit", "in", "out"],
        ["tokenize", "a", "tokens", "encoded 10", "stored 10"],
        ["pack", "a", "tokens", "EOS 1, drawn 8", "placed 9"],
        ["data", "part", "fingerprint"],
        ["training", "plan", "ab"],
        ["held out: held", "", "not known to its loader"],
        ["", "after step 0", "after step 9"],
        ["jax", "1", "2"],
        ["new", "not known", "4"],
    ]
    assert paragraphs(text) == []


def test_a_table_that_is_not_there_says_why(tmp_path: Path) -> None:
    made = tmp_path / "run"
    made.mkdir()
    (made / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert paragraphs(page([made])) == [
        "there was none",
        "the run had none written",
        "not recorded",
        "the run did not watch for spikes",
        "nothing was changed while it ran",
        "it was never begun again",
        "plan.json is written at checkpoints of a run of several datasets and when it stops, but "
        "not in streaming",
        "not recorded",
        "not recorded",
        "not recorded",
        "no run.yaml",
    ]
    plan = {"unit": "rows", "steps": 1_200, "datasets": [], "notes": ["one", "two"]}
    write_kept(made / "plan.json", plan)
    (made / "ledger.json").write_text("{")
    (made / "metrics.jsonl").write_text('{"step": 1201, "loss": 2.0}\n')
    assert paragraphs(page([made]))[6:9] == [
        "there was none",
        "counted for the first 1,200 steps, when the run had ended there; it has continued since",
        "one",
    ]


def test_tokens_that_are_drawn_twice_flow_from_somewhere() -> None:
    entry = {"dataset": "a", "unit": "tokens"}
    entries = [
        {**entry, "stage": "tokenize", "in": {"encoded": 5}, "out": {"stored": 5}},
        {**entry, "stage": "pack", "in": {"drawn": 12}, "out": {"placed": 12}},
    ]
    assert flow(flows(entries, ["a"])) == {
        ("a: encoded", "tokenize a"): 5,
        ("tokenize a", "a: stored"): 5,
        ("a: stored", "a: drawn"): 5,
        ("a: drawn again", "a: drawn"): 7,
        ("a: drawn", "pack a"): 12,
        ("pack a", "a: placed"): 12,
    }


def test_targets_are_drawn_once() -> None:
    entry = {"dataset": "a", "unit": "tokens"}
    mask = {**entry, "stage": "loss_mask", "in": {"stored": 5}, "out": {"targets": 3, "masked": 2}}
    stored = {**entry, "stage": "tokenize", "in": {"encoded": 5}, "out": {"stored": 5}}
    placed = {"in": {"placed": 5}, "out": {"targets": 2, "masked": 2, "segment starts": 1}}
    labels = {**entry, **placed, "stage": "labels"}
    once = flow(flows([stored, mask, labels], ["a"]))
    assert [count for (_, to), count in once.items() if to == "a: targets"] == [2]
    for entries in ([stored, mask], [mask, labels]):  # without mixing; streaming
        assert flow(flows(entries, ["a"]))["loss_mask a", "a: targets"] == 3


def test_a_long_curve_keeps_its_ends_and_its_spikes() -> None:
    values = np.sin(np.arange(100_000) / 900)
    values[[12_345, 77_777]] = 40.0, -40.0
    values[[1, 2, -3, -2]] = -9.0, 9.0, -9.0, 9.0  # the ends are neither least nor most there
    steps, kept = thinned(np.arange(100_000.0), values)
    assert len(steps) <= MOST_POINTS
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert {(12_345, 40.0), (77_777, -40.0)} <= set(zip(steps, kept, strict=True))
    assert steps == sorted(steps)


def test_restarts_are_kept_and_those_that_were_undone_go(tmp_path: Path) -> None:
    for step in (5, 9, 7):
        write_restart(tmp_path, step)
    assert [one["step"] for one in read_kept(tmp_path / "restarts.json")] == [5, 7]


def test_several_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(run(tmp_path, name=name)) for name in ("one", "two")]
    assert main(["report", *runs]) == 0
    assert not (tmp_path / "one" / "report.html").exists()  # the page of one run stays
    text = (tmp_path / "one" / "comparison.html").read_text()
    assert [one["name"] for one in numbers(text)] == ["one", "two"]
    assert "<summary>two</summary>" in text
    older = shutil.copytree(runs[0], tmp_path / "older" / "one")
    write_report([older, *runs], tmp_path / "both.html")
    names = [one["name"] for one in numbers((tmp_path / "both.html").read_text())]
    assert names == ["older/one", "one", "two"]
    assert main(["report", runs[0], "--port", "80"]) == 2
    assert "no effect without --serve" in capsys.readouterr().err


def test_the_server_shows_the_page_to_this_machine_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path)
    with server([folder]) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        host, port = serving.server_address[:2]
        assert host == "127.0.0.1"

        def ask(path: str, method: str = "GET", name: str = f"localhost:{port}") -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request(method, path, headers={"Host": name})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        whole = ask("/")[1]
        assert numbers(whole)[0]["name"] == "run"
        assert whole.endswith("</html>"), "as many bytes as were promised"
        for path in ("/ledger.json", "/../run/ledger.json", "/%2e%2e/", "/?x"):
            assert ask(path)[0] == 404, path
        assert ask("/", name="evil.example")[0] == 403
        assert ask("/news.json", name=f"evil.example:{port}")[0] == 403
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask("/", method)[0] == 501, method
        line = json.dumps({"step": 31, "loss": 0.125})
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(line + "\n" + line[:9])  # the second is half written
        with socket.create_connection(("127.0.0.1", port)) as leaving:
            leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaving.sendall(f"GET / HTTP/1.0\r\nHost: localhost:{port}\r\n\r\n".encode())
        news = json.loads(ask("/news.json")[1])
        assert news["numbers"][0]["curves"]["loss"][1][-1] == 0.125
        assert "<td>last step logged</td><td>31</td>" in news["tables"]
        assert "<script" not in news["tables"]
        (folder / "metrics.jsonl").write_text("damage\n")
        assert ask("/news.json")[0] == 500
        serving.shutdown()
    assert capsys.readouterr().err == "", "one who leaves the page is no error"
    assert main(["report", str(folder), "--serve"]) == 2
    assert "line 1: not a metrics record" in (said := capsys.readouterr().err)
    assert "--port" not in said


def test_of_a_growing_file_only_what_is_new_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that was half written counts once it is whole, and a replaced file is read anew."""
    path, reader = tmp_path / "metrics.jsonl", CurvesReader(tmp_path / "metrics.jsonl")
    read: list[int] = []
    begin = numbers_module.records_from
    monkeypatch.setattr(
        numbers_module, "records_from", lambda p, at, n: read.append(at) or begin(p, at, n)
    )

    def steps() -> list[int]:
        curves = reader.read()
        assert curves is not None
        return curves.points()["loss"][0]

    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 6)]
    path.write_text(lines[0] + lines[1][:9])
    assert steps() == [1]
    with path.open("a") as file:
        file.write(lines[1][9:] + lines[2])
    assert steps() == [1, 2, 3]
    assert read == [0, len(lines[0])]
    with path.open("a") as file:
        file.write("damage\n")
    with pytest.raises(StorageError, match="line 4"):
        reader.read()
    os.replace(shutil.copy(path, tmp_path / "new"), path)
    path.write_text("".join(lines[:2]) + lines[4])  # a run that went on from step 2
    assert steps() == [1, 2, 5]


ASK = """<script>
charts.forEach((chart) => chart.getZr().flush());
const option = (title) => charts.get(title).getOption();
const wide = [...charts.values()].map((chart) => chart.getWidth() - chart.getDom().clientWidth);
const [offsetX, offsetY] = charts.get("gradient norm").convertToPixel({ gridIndex: 0 }, [9, 1]);
clicked(charts.get("gradient norm"), { offsetX, offsetY });
const before = option("loss").series[0].data[29][1];
byId("smoothing").value = 0.9; byId("logarithmic").checked = true; byId("more").checked = true;
drawAll();
const found = {
  clicked: byId("mark").textContent, charts: [...charts.keys()], wide: Math.max(...wide), before, after: option("loss").series[0].data[29][1],
  axis: option("loss").yAxis[0].type, marks: option("loss").series[0].markLine.data.length,
  links: option("where the tokens went").series[0].links.length,
  flow: option("where the tokens went").series[0].orient,
};
const margins = charts.get("reward_margin");
const [x, y] = margins.convertToPixel({ gridIndex: 0 }, margins.getOption().series[0].data[8]);
clicked(margins, { offsetX: x, offsetY: y });
found.beside = byId("mark").textContent;
const shown = () => [...document.querySelectorAll(".plot")].filter((one) => one.checkVisibility()).map((one) => one.dataset.title);
found.all = shown();
found.together = margins.group === charts.get("loss").group;
byId("more").checked = false;
drawAll();
found.few = shown();
document.body.dataset.found = JSON.stringify(found);
</script>"""


def show(file: Path, size: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What Chromium prints when it opens a page in a window of `size`."""
    browser = shutil.which(os.environ["EASYPIPE_CHROMIUM"])
    assert browser
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    own = [f"--user-data-dir={file.parent / 'profile'}", f"--window-size={size}"]
    command = [browser, *flags, *own, *arguments, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def found_in(dom: str) -> dict[str, Any]:
    """What a script left in the element of the body."""
    [found] = re.findall(r'data-found="(.*?)"', dom)
    return json.loads(html.unescape(found))


@pytest.mark.skipif("EASYPIPE_CHROMIUM" not in os.environ, reason="needs a browser: nox -s html")
@pytest.mark.parametrize("size", ["1400,1800", "380,1800"])
def test_in_a_browser(tmp_path: Path, size: str) -> None:
    """The values that it draws, read from the page itself; nothing of the data runs, nothing is
    asked for."""
    made = run(tmp_path)
    lines = map(json.loads, (made / "metrics.jsonl").read_text().splitlines())
    margins = [json.dumps(line | {"reward_margin": 20.5 - line["step"]}) for line in lines]
    (made / "metrics.jsonl").write_text("\n".join(margins) + "\n")
    file = write_report(made, tmp_path / "page.html")
    file.write_text(file.read_text() + ASK)
    done = show(file, size, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    assert "<b>held" not in done.stdout.partition("<script")[0]
    found = found_in(done.stdout)
    for told in (
        "change at step 9: load.batch_size: was 8, is 16",
        "restart at step 9",
        "--step 8",
    ):
        assert told in found["clicked"]
    assert found["charts"][:2] == ["loss", "gradient norm"]
    assert {"mixture", "where the tokens went"} <= set(found["charts"])
    assert math.isclose(found["before"], 4 / 30, rel_tol=1e-5)
    weights = [0.9 ** (30 - i) for i in range(1, 31)]
    mean = sum(w * 4 / i for i, w in enumerate(weights, 1)) / sum(weights)
    assert math.isclose(found["after"], mean, rel_tol=1e-5)
    assert (found["axis"], found["marks"], found["links"]) == ("log", 2, 7)
    assert found["wide"] < 20  # a scroll bar, until the next frame: no chart lies over the next
    assert "step 9: reward_margin" in found["beside"], "its last values have no logarithm"
    assert found["few"] == ["loss", "gradient norm", "mixture"] == found["all"][:3]
    assert "reward_margin" in found["all"]
    assert found["together"], "every curve zooms with the others"
    assert found["flow"] == ("horizontal" if size.startswith("1400") else "vertical")
    show(file, size, f"--screenshot={tmp_path / 'page.png'}")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_the_newest_samples_stand_first(tmp_path: Path) -> None:
    made = run(tmp_path)
    lines = [
        json.dumps({"step": step, "samples": [{"prompt": "say", "text": f"said at {step}"}]})
        for step in (10, 20)
    ]
    (made / "samples.jsonl").write_text("\n".join(lines) + "\n")
    page = write_report(made).read_text()
    assert page.index("said at 20") < page.index("said at 10")


def test_a_config_in_another_encoding_is_shown_as_far_as_it_can_be(tmp_path: Path) -> None:
    made = run(tmp_path)
    (made / "run.yaml").write_bytes("output_dir: caf\xe9\n".encode("latin-1"))
    assert "output_dir: caf\ufffd" in write_report(made).read_text()


def test_spikes_of_the_gradient_norm_are_marked(tmp_path: Path) -> None:
    """Each by what was usual just before it; a step that ends the file or begins it counts too."""
    made = run(tmp_path)
    norms = [2 - i / 400 + i % 7 / 100 for i in range(1, 361)]
    norms[41] = norms[250] = norms[359] = 9.0
    norms[120] = 3.0  # not twice the usual
    lines = [{"step": 2 * i, "loss": 1.0, "grad_norm": norm} for i, norm in enumerate(norms, 1)]
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (drawn,) = numbers(page([made]))
    found = [(mark["step"], mark["text"]) for mark in drawn["marks"] if mark["kind"] == "spike"]
    assert [step for step, _ in found] == [502, 720]
    usual = [np.median(norms[100:200]), np.median(norms[200:300])]
    for (_, text), middle in zip(found, usual, strict=True):
        assert text == f"gradient norm 9, usual before it {middle:.3g}"


def test_many_spikes_are_the_greatest() -> None:
    norms = [1.0] * 100 + [10.0 + i for i in range(100)]
    seen = {"grad_norm": array("d", norms)}
    steps = {"grad_norm": array("d", range(1, 201))}
    found = spikes(Curves({}, {}, steps=steps, values=seen))
    assert found == [(i, float(i - 91), 1.0) for i in range(181, 201)]
    assert not spikes(Curves({}, {}))


def test_a_million_steps_make_a_small_page(tmp_path: Path) -> None:
    """A tenth of them here: what is drawn does not grow."""
    made = tmp_path / "run"
    made.mkdir()
    with (made / "metrics.jsonl").open("w") as file:
        for i in range(1, 100_001):
            file.write(f'{{"step": {i}, "loss": {9 / i:.6f}, "grad_norm": {1 / i:.6f}}}\n')
    written = write_report(made).stat().st_size
    assert written < 1.5e6


TIMED = """<script>
addEventListener("load", () => {
  for (const chart of charts.values()) chart.getZr().flush();
  for (const one of document.querySelectorAll("canvas")) one.getContext("2d").getImageData(0, 0, 1, 1);
  const requests = performance.getEntriesByType("resource").length;
  const found = { opened: performance.now(), charts: charts.size, requests };
  document.body.dataset.found = JSON.stringify(found);
});
</script>"""


@pytest.mark.skipif("EASYPIPE_CHROMIUM" not in os.environ, reason="needs a browser: nox -s html")
def test_a_run_of_a_million_steps_opens_in_a_second(tmp_path: Path) -> None:
    """Ten metrics. From the start of navigation until every chart is drawn and its pixels are
    there, each time in a new browser. The fastest counts: other work of a machine only slows it.
    """
    made = tmp_path / "run"
    made.mkdir()
    names = ("grad_norm", "learning_rate", "tokens_per_second", "mfu", "mfu_palm", "data_wait")
    names += ("nll/code", "nll/docs", "reward_margin")
    noise = np.random.default_rng(1).normal(1, 0.05, (1_000, len(names)))
    rows = [json.dumps(dict(zip(names, row, strict=True)))[1:] for row in noise.round(6).tolist()]
    with (made / "metrics.jsonl").open("w") as file:
        for step in range(1, 1_000_001):
            loss = 2 + 9 * step**-0.3 * noise[step % 1_000, 0]
            file.write(f'{{"step": {step}, "loss": {loss:.6g}, {rows[step % 1_000]}\n')
    page = write_report(made)
    (made / "metrics.jsonl").unlink()  # 200 MB
    assert page.stat().st_size <= 5e6
    page.write_text(page.read_text() + TIMED)
    opened: list[float] = []
    while len(opened) < 3 or (min(opened) > 1_000 and len(opened) < 9):
        done = show(page, "1400,1800", "--dump-dom")
        assert "CONSOLE" not in done.stderr
        found = found_in(done.stdout)
        assert (found["charts"], found["requests"]) == (7, 0)
        opened.append(found["opened"])
    print(f"{page.stat().st_size:,} bytes, opened in {[round(one) for one in opened]} ms")
    assert min(opened) <= 1_000


def test_many_metrics_make_a_small_page(tmp_path: Path) -> None:
    made = tmp_path / "run"
    made.mkdir()
    with (made / "metrics.jsonl").open("w") as file:
        for i in range(1, 2001):
            told = {f"nll/{name}": 9 / (i + name) for name in range(150)}
            file.write(json.dumps({"step": i, "loss": 9 / i, **told}) + "\n")
    assert write_report(made).stat().st_size < 2e6
    assert numbers((made / "report.html").read_text())[0]["curves"]["loss"][0][-1] == 2000


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7])
def test_the_first_documents_of_a_skipped_batch_are_named(count: int) -> None:
    documents = [{"dataset": "d", "file": "f", "row": row} for row in range(count)]
    said = documents_of({"documents": documents, "problem": "unknown"})
    assert said.count("d f row") == min(count, 5)
    assert said.endswith(f" and {count - 5} more") == (count > 5)
    assert (said == "unknown") == (count == 0)
    pieces = [{"dataset": "d", "file": "f", "row": 3}] * max(1, count - 4)
    assert documents_of({"documents": pieces}) == "d f row 3", "a document may have many pieces"
