"""The metrics of a run for Prometheus: `monitor.prometheus_port` opens an endpoint on this machine.

Every name is in `names.py`, in base units.  The step time is a histogram; all else are the values of the last record.
Labels: `run`, and nothing that grows (no step).  It listens on the loopback address unless `prometheus_host` says
otherwise, because metrics tell what is trained here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lumen.core.errors import ConfigError
from lumen.core.log import say
from lumen.monitor.names import BY_KEY

STEP = "train/step_seconds"
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
"""Seconds: from a tiny model's step to one of many micro-batches with offload."""


class Endpoint:
    """Serves /metrics while a run goes.

    port: 0 takes a free one, then in `port`.  Raises ConfigError where prometheus-client is missing or the port taken.
    """

    def __init__(self, run: str, port: int, host: str = "127.0.0.1", version: str = ""):
        try:
            import prometheus_client as client
            from prometheus_client import core
        except ImportError as error:
            raise ConfigError(
                "monitor.prometheus_port needs the prometheus-client package",
                where="monitor.prometheus_port",
                fix="pip install 'lumen-train[monitor]'",
            ) from error
        self._core, self.run = core, run
        self.values: dict[str, float] = {}
        registry = client.CollectorRegistry()
        step = BY_KEY[STEP]
        self._steps = client.Histogram(step.prometheus, step.text, ["run"], buckets=BUCKETS, registry=registry)
        info = client.Gauge("lumen_build_info", "1, with the version as a label", ["run", "version"], registry=registry)
        info.labels(run, version).set(1)
        registry.register(self)
        try:
            self._server, self._thread = client.start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"port {port} of {host} cannot be opened: {error.strerror or error}",
                where="monitor.prometheus_port",
                fix="choose another port, or leave it out",
            ) from error
        self.port = int(self._server.server_port)
        say(f"metrics for Prometheus: http://{host}:{self.port}/metrics")

    def collect(self) -> Iterator[Any]:
        """Called by the client library at every scrape."""
        for key, value in sorted(self.values.items()):
            metric = BY_KEY[key]
            family = self._core.CounterMetricFamily if metric.kind == "counter" else self._core.GaugeMetricFamily
            found = family(metric.prometheus, metric.text, labels=["run"])
            found.add_metric([self.run], value)
            yield found

    def write(self, record: dict[str, Any]) -> None:
        """Take the values of a record; events and unknown keys have none."""
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
        self.values = {**self.values, **{key: float(v) for key, v in numbers.items() if key in BY_KEY and key != STEP}}

    def step(self, seconds: float) -> None:
        """Count one optimizer step."""
        self._steps.labels(self.run).observe(seconds)

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
