"""``xla-debug run``: where a script's time goes, what to change first, and the HTML page."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from xla_debug import cli

BAD = '''
"""A deliberately bad training script."""
import sys, time
import torch, torch_xla
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Slow(TensorDataset):
    def __getitem__(self, i):
        time.sleep(0.001)
        return super().__getitem__(i)

torch.manual_seed(0)
data = Slow(torch.randn(120, 16), torch.randint(4, (120,)))
loader = DataLoader(data, batch_size=32)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        x, y = x.to("xla"), y.to("xla")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        print("loss", loss.item())
        loss.backward()
        optimizer.step()
        torch_xla.sync()
    torch.linalg.ldl_factor(torch.eye(3).to("xla"))
sys.exit(int(sys.argv[1]))
'''


def line_of(text):
    return next(i for i, found in enumerate(BAD.split("\n"), 1) if text in found)


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "bad.py").write_text(BAD)
    command = [sys.executable, "-c", "import sys, xla_debug.cli as c; sys.exit(c.main())"]
    command += ["run", "-o", "page.html", "bad.py", "7"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return folder, done


def test_the_script_runs_as_it_would_alone(bad):
    _, done = bad
    assert done.returncode == 7, done.stderr  # the script's own status
    assert len(re.findall(r"^loss ", done.stdout, re.M)) == 12


def test_the_terminal_says_where_the_time_went(bad):
    _, done = bad
    text = done.stdout
    assert "xla-debug: 12 steps in " in text
    for part in ("Python and tracing", "compiling", "waiting for data", "launching and waiting"):
        assert re.search(rf"^ {part}[^│]*│ +\d+\.\d\d │ +\d+% │ +\d+\.\d\d *$", text, re.M), part
    seconds = [float(n) for n in re.findall(r"│ +(\d+\.\d\d) │ +\d+% │", text)]
    assert sum(seconds[:-1]) == pytest.approx(seconds[-1], abs=0.05)  # the last row is their sum
    assert f"bad.py:{line_of('model(x)')} in <module>" in text
    assert "dimension 0 went from 32 to 24" in text.split("change first:")[1].replace("\n", " ")
    assert re.search(rf"value read +│ +12 │ .*bad\.py:{line_of('loss.item()')}", text)
    assert re.search(rf"aten::linalg_ldl_factor_ex +│ +3 │ .*bad\.py:{line_of('ldl_factor')}", text)
    waiting = re.search(r"^ waiting for data +│ +(\d+\.\d\d)", text, re.M)
    assert float(waiting[1]) >= 0.3  # 360 samples of a millisecond each


def test_the_first_change_is_the_dearest(bad):
    text = bad[1].stdout.split("change first:")[1]
    costs = [float(n) for n in re.findall(r"^\d\. .*\((\d+\.\d\d) s\)", text, re.M)]
    assert 1 <= len(costs) <= 3 and costs == sorted(costs, reverse=True)
    titles = re.findall(r"^\d\. (.*) \(", text, re.M)
    assert any(title.endswith("compiled: batch size") for title in titles)  # the last batch
    assert "the loop waits for data" in titles
    (where,) = re.findall(r"^\d\. the loop waits for data \(.*\) at bad\.py:(\d+)", text, re.M)
    assert int(where) == line_of("in enumerate(loader)")


class Page(HTMLParser):
    """Headings, table cells and what is not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.headings, self.sources, self.text = [], [], [], ""

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.sources += [v for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if "script" not in self.open:
            self.text += data


def test_the_page_is_one_whole_file(bad):
    page = Page()
    page.feed((bad[0] / "page.html").read_text("utf-8"))
    assert page.open == [] and page.sources == []  # nothing is fetched from elsewhere
    assert page.headings == [
        "What to change first", "Time per step", "Compilations and their causes",
        "Device memory after each step", "Fallbacks and reads by line", "Every compilation",
    ]  # fmt: skip
    assert f"bad.py:{line_of('loss.item()')}" in page.text
    assert "dimension 0 went from 32 to 24" in page.text
    # its plots need no library: 4.8 MB with one
    assert (bad[0] / "page.html").stat().st_size < 100_000
    assert page.open == [] and page.text.count("Python and tracing") >= 2
    assert "12steps" in page.text and "3operators run on the CPU" in page.text


def test_a_script_that_is_not_there(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "nope.py"]) == 2
    assert capsys.readouterr().err == (
        "xla-debug run: nope.py is not a file; name a script, or a module with -m\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_raises_is_reported_too(tmp_path):
    script = tmp_path / "raises.py"
    script.write_text("import torch, torch_xla\nx = torch.ones(3).to('xla') + 1\n1 / 0\n")
    command = [sys.executable, "-c", "import sys, xla_debug.cli as c; sys.exit(c.main())", "run"]
    command += ["-o", str(tmp_path / "p.html"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == (
        f'Traceback (most recent call last):\n  File "{script}", line 3, in <module>\n    1 / 0\n'
        "    ~~^~~\nZeroDivisionError: division by zero\n"
    )
    assert "no step was run on an xla device" in done.stdout
    assert "What to change first" in (tmp_path / "p.html").read_text("utf-8")
