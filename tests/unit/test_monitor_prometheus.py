"""The Prometheus endpoint, scraped and read by the client library's own parser."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from lumen.core import ConfigError
from lumen.monitor.config import MonitorConfig
from lumen.monitor.names import METRICS
from lumen.monitor.report import Reporter


def scrape(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {
        s.name: s for family in text_string_to_metric_families(text) for s in family.samples if "le" not in s.labels
    }


def reporter(folder: Path, port: int = 0) -> Reporter:
    return Reporter(MonitorConfig(run_name="mine", monitor={"prometheus_port": port}), folder)


def test_a_scrape_gives_the_last_record_under_the_documented_names(tmp_path: Path) -> None:
    one = reporter(tmp_path)
    assert one.endpoint is not None
    port = one.endpoint.port
    try:
        for seconds in (0.2, 0.4):
            one.step(1, SimpleNamespace(loss=2.5, tokens=100, seconds=seconds))
        record = {"step": 2, "train/loss": 2.5, "train/tokens_total": 200, "train/step_seconds": 0.3}
        one.write({**record, "thermal/temperature_celsius": 71.0, "train/grad_norm": float("nan")})
        one.write({"step": 2, "event": "thermal: something"})
        found = scrape(port)
        assert found["lumen_train_loss"].value == 2.5 and found["lumen_train_loss"].labels == {"run": "mine"}
        assert found["lumen_train_tokens_total"].value == 200
        assert found["lumen_thermal_temperature_celsius"].value == 71
        assert found["lumen_train_step_duration_seconds_count"].value == 2
        assert found["lumen_train_step_duration_seconds_sum"].value == pytest.approx(0.6)
        assert found["lumen_train_grad_norm"].value != found["lumen_train_grad_norm"].value, "NaN stays NaN"
        assert found["lumen_build_info"].value == 1
        one.write({"step": 3, "train/loss": 2.25})
        assert scrape(port)["lumen_train_loss"].value == 2.25
        bases = {m.prometheus for m in METRICS} | {"lumen_build_info", "lumen_train_step_duration_seconds_created"}
        for name in found:
            assert name in bases or name.startswith("lumen_train_step_duration_seconds_"), name
        with pytest.raises(ConfigError, match="cannot be opened"):
            reporter(tmp_path / "two", port)
    finally:
        one.close()
    with pytest.raises(OSError):
        scrape(port)


def test_nothing_is_served_unless_asked_for(tmp_path: Path) -> None:
    assert Reporter(MonitorConfig(), tmp_path).endpoint is None
