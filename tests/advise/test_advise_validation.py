"""Predictions are compared with measurements as they should be, and constants are found from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from advise_validation import tables
from advise_validation.__main__ import app
from advise_validation.campaign import METHODS, Campaign, Cell, Measured, compare, score, setup_of
from advise_validation.fitting import FREE, fit
from hvd_compress.engine.spec import parse
from hvd_compress.errors import SpecError
from hvd_compress.tools.advise.constants import Constants
from hvd_compress.tools.advise.model import predict
from hvd_compress.tools.advise.rates import Rate, Rates
from hvd_compress.tools.terminal import write_json

RUNNER = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"})

KNOWN = Rates(1e-10, {spec: Rate(1e-9, 1e-9, 1e-11) for spec in METHODS if not parse(spec).linear})

TRUE = Constants(byte=6e-9, half=5e-8, cycle=3e-3, coding=1.5)


def jobs(constants: Constants, *hosts: int) -> list[Measured]:
    """Measurements on a machine that is as the model says."""
    found = []
    for n in hosts:
        for link in ("100mbit", "1gbit"):
            job = Measured(n, link, 2, 0.05 * n, {}, {})
            made = {spec: predict(spec, setup_of(job), KNOWN, constants) for spec in METHODS}
            steps, traffic = ({s: getattr(one, name) for s, one in made.items()} for name in ("step", "wire"))
            found.append(job._replace(steps=steps, traffic=traffic))
    return found


def test_a_true_model_has_no_errors() -> None:
    cells = compare(jobs(TRUE, 2, 4), KNOWN, TRUE)
    assert len(cells) == 2 * 2 * len(METHODS)
    assert all(cell.error == 0 and cell.traffic == cell.wire > 0 for cell in cells)
    assert score(cells)[:3] == (28, 1.0, 0.0)


def test_jobs_are_what_was_run() -> None:
    setup = setup_of(jobs(TRUE, 8)[0])
    assert (setup.params, setup.ranks, setup.rate, setup.cores_per_rank) == (8_407_050, 8, 1e8, 0.25)
    assert setup.vectors == pytest.approx((8 * 1024 + 10) / 8_407_050)


def test_a_step_alone_is_known_from_all_jobs_with_as_many_hosts() -> None:
    found = [job._replace(compute=job.compute * by) for job, by in zip(jobs(TRUE, 2, 4), (1, 1.2, 0.7, 1), strict=True)]
    assert {(cell.hosts, round(cell.error, 2)) for cell in compare(found, KNOWN, TRUE) if cell.spec == "qsgd"} == {
        (cell.hosts, round(cell.error, 2))
        for cell in compare([job._replace(compute={2: 0.11, 4: 0.17}[job.hosts]) for job in found], KNOWN, TRUE)
        if cell.spec == "qsgd"
    }


@pytest.mark.slow
def test_constants_are_found_from_measurements() -> None:
    """From 2 and 8 hosts, for 4: each of them as far as the steps tell, and so the steps."""
    found = fit(jobs(TRUE, 2, 8), KNOWN, Constants())
    assert {name for name in Constants._fields if getattr(found, name) != getattr(Constants(), name)} <= set(FREE)
    before, after = (score(compare(jobs(TRUE, 4), KNOWN, constants)) for constants in (Constants(), found))
    assert after.median < 0.02 < before.median
    assert abs(after.worst.error) < 0.05
    for name in ("byte", "half", "coding"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.2)


def test_scores() -> None:
    cells = [
        Cell(2, "1gbit", spec, 1.0, predicted, 2e6, 1e6)
        for spec, predicted in zip("abcd", (1.2, 0.5, 1.1, 0.9), strict=True)
    ]
    found = score(cells)
    assert (found.cells, found.good, found.worst.spec) == (4, 0.75, "b")
    assert found.median == pytest.approx(0.15)
    assert "| 2 | 1gbit | `a` | 1,000 ms | 1,200 ms | +20% | 2 MB | 1 MB |" in tables.markdown(cells)


def test_measurements_travel_as_files(tmp_path: Path) -> None:
    campaign = Campaign("a machine", KNOWN, jobs(TRUE, 2))
    write_json(tmp_path / "measured.json", campaign.facts())
    assert Campaign.read(tmp_path / "measured.json") == campaign
    mixed = [*campaign.jobs, campaign.jobs[0]._replace(framework="ddp")]
    write_json(tmp_path / "mixed.json", campaign._replace(jobs=mixed).facts())
    with pytest.raises(SpecError, match=r"mixed.json' cannot be read"):
        Campaign.read(tmp_path / "mixed.json")
    (tmp_path / "other.json").write_text('{"machine": ""}')
    with pytest.raises(SpecError, match=r"other.json' cannot be read .*advise_validation --json"):
        Campaign.read(tmp_path / "other.json")


def test_the_command_reads_and_compares(tmp_path: Path) -> None:
    path, page = tmp_path / "measured.json", tmp_path / "table.md"
    write_json(path, Campaign("a machine", KNOWN, jobs(TRUE, 2, 4, 8)).facts())
    plain = RUNNER.invoke(app, ["--measured", str(path), "--markdown", str(page)])
    assert plain.exit_code == 0, plain.output
    assert len(page.read_text().splitlines()) == 2 + 6 * len(METHODS)


def test_measurements_that_cannot_be_read_are_refused() -> None:
    result = RUNNER.invoke(app, ["--measured", "nothing.json"])
    assert result.exit_code == 2 and "measured='nothing.json' cannot be read" in result.stderr


def test_there_must_be_something_to_fit_to(tmp_path: Path) -> None:
    write_json(tmp_path / "measured.json", Campaign("a machine", KNOWN, jobs(TRUE, 4)).facts())
    result = RUNNER.invoke(app, ["--measured", str(tmp_path / "measured.json"), "--fit"])
    assert result.exit_code == 2
    assert "fit is not possible" in result.output


@pytest.mark.needs("hosts")
@pytest.mark.long
@pytest.mark.parametrize("framework", ["horovod", "ddp"])
def test_a_job_on_hosts(framework: str, tmp_path: Path) -> None:
    """What is measured is a step: its time is not judged here, but where it comes from."""
    path = tmp_path / "measured.json"
    where = ("--hosts", "2", "--rate", "1gbit", "--steps", "1", "--size", "4096", "--turns", "1")
    result = RUNNER.invoke(app, ["--framework", framework, *where, "--json", str(path)])
    assert result.exit_code == 0, result.output
    (job,) = json.loads(path.read_text())["jobs"]
    assert (job["hosts"], job["link"], job["framework"]) == (2, "1gbit", framework)
    assert set(job["steps"]) == set(job["traffic"]) == set(METHODS)
    assert job["traffic"]["none"] == pytest.approx(4 * 8_407_050, rel=0.1)  # of 2 ranks: 2 (2 - 1) / 2 of the gradients
    assert 0 < job["compute"] < min(job["steps"].values()) * 10
    assert job["steps"]["none"] > 4 * 8_407_050 * 8 / 1e9 / 2, "a part of its bytes may travel during the backward pass"
