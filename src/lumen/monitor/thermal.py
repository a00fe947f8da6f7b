"""A hot card: train slower, or pause, before the hardware does it or gives up.

Three states, by the temperature of the device that trains:

    cool     below the maximum: nothing happens
    slowed   above it: after each step the loop rests, so that the share of time at work (the duty cycle) falls from 1
             at the maximum to 1/4 just below the critical limit
    paused   at the critical limit: a checkpoint is committed, and the loop waits

Hysteresis: a state is left only when the temperature has fallen by some degrees below the limit that began it, so that
it does not flicker.  A pause ends when the card is cool again, below the maximum less the hysteresis.

Resting and pausing touch neither weights nor random state nor the order of rows: the losses are those of an
undisturbed run, bit for bit.  Which sensor: the edge, where the chip has one, else the junction; memory runs hotter by
design and is not taken.  The sensor is read in a thread of its own, so a slow tool costs no step time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lumen.core.log import say, warn
from lumen.hardware import Gpu, View
from lumen.hardware.text import number
from lumen.monitor.config import MonitorSection
from lumen.monitor.telemetry import cpu_temperature, read_telemetry

Sensor = Callable[[], float | None]
"""°C now, or None where it is not known."""

LEAST_DUTY = 0.25
"""Share of time at work just below the critical limit."""

MOST_REST = 30.0
"""Seconds of one rest at most, however long the step was."""

GPU_LIMIT = 85.0
"""°C above which training on a GPU slows where the configuration says nothing."""

CRITICAL_ABOVE = 10.0
"""The critical limit lies so many degrees above the maximum where the configuration says nothing."""

BLIND = 60
"""Readings in a row without a temperature after which a pause ends: a dead sensor must not hold a run for ever."""


@dataclass
class ThermalGuard:
    """Rests and pauses of one run.

    maximum, critical, hysteresis: °C.  interval: seconds between readings while paused.
    clock, sleep: of this process; tests put their own.
    """

    sensor: Sensor
    maximum: float
    critical: float
    hysteresis: float = 5.0
    interval: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    state: str = "cool"
    temperature: float | None = None
    duty: float = 1.0
    rested: float = 0.0
    paused: float = 0.0
    pauses: int = 0
    events: list[str] = field(default_factory=list)

    def after_step(self, seconds: float, checkpoint: Callable[[], Any], stop: Callable[[], bool]) -> list[str]:
        """Look at the temperature after a step of `seconds`, and rest or pause.  Returns what changed, as events.

        checkpoint: commits one; called before a pause.  stop: ends a rest or a pause early.
        """
        self.events = []
        self._look()
        if self.state == "paused":
            checkpoint()
            self._pause(stop)
        if self.state == "slowed" and seconds > 0:
            self._rest(min(MOST_REST, seconds * (1 / self.duty - 1)), stop)
        return self.events

    def metrics(self) -> dict[str, float]:
        """Its figures under the keys of `names.py`."""
        found = {
            "thermal/duty_ratio": self.duty,
            "thermal/rested_seconds_total": round(self.rested, 3),
            "thermal/paused_seconds_total": round(self.paused, 3),
            "thermal/pauses_total": self.pauses,
        }
        return found if self.temperature is None else {"thermal/temperature_celsius": self.temperature, **found}

    def close(self) -> None:
        """End the thread that reads the sensor, where there is one."""
        if isinstance(self.sensor, BackgroundSensor):
            self.sensor.close()

    def _look(self) -> None:
        """Read the sensor and move between the states."""
        now = self.sensor()
        if now is None:
            return
        self.temperature = now
        if now >= self.critical:
            self._become(
                "paused", f"{now:.0f} °C reaches the critical limit of {self.critical:.0f}: saving, then pausing"
            )
        elif now > self.maximum and self.state == "cool":
            self._become("slowed", f"{now:.0f} °C is above {self.maximum:.0f}: training slows")
        elif now < self.maximum - self.hysteresis and self.state != "cool":
            self._become("cool", f"{now:.0f} °C: cool again, full speed")
        above = (now - self.maximum) / (self.critical - self.maximum)
        slowed = self.state == "slowed"
        self.duty = 1 - (1 - LEAST_DUTY) * min(1.0, max(0.1, above)) if slowed else float(self.state == "cool")

    def _become(self, state: str, text: str) -> None:
        if state != self.state:
            self.state = state
            self.events.append(f"thermal: {text}")
            (say if state == "cool" else warn)(self.events[-1])

    def _rest(self, seconds: float, stop: Callable[[], bool]) -> None:
        started = self.clock()
        while not stop() and (left := seconds - (self.clock() - started)) > 1e-3:
            self.sleep(min(0.5, left))
        self.rested += self.clock() - started

    def _pause(self, stop: Callable[[], bool]) -> None:
        started, blind = self.clock(), 0
        self.pauses += 1
        while self.state == "paused" and not stop():
            self._sleep_interval(stop)
            before = self.temperature
            self.temperature = None
            self._look()
            blind = blind + 1 if self.temperature is None else 0
            if self.temperature is None:
                self.temperature = before
            if blind >= BLIND:
                self._become("slowed", f"the sensor has told nothing {BLIND} times: going on slowly")
                self.duty = LEAST_DUTY
        self.paused += self.clock() - started

    def _sleep_interval(self, stop: Callable[[], bool]) -> None:
        started = self.clock()
        while not stop() and (left := self.interval - (self.clock() - started)) > 1e-3:
            self.sleep(min(0.5, left))


class BackgroundSensor:
    """Reads a sensor every `interval` seconds in a daemon thread; calling it gives the last value at once."""

    def __init__(self, read: Sensor, interval: float):
        self.read, self.interval = read, interval
        self.value: float | None = None
        self._ended = threading.Event()
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lumen-temperature", daemon=True)
        self._thread.start()

    def __call__(self) -> float | None:
        self._first.wait(timeout=0.5)
        return self.value

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.value = self.read()
            except Exception:  # a tool that misbehaves is a sensor that tells nothing
                self.value = None
            self._first.set()
            self._ended.wait(self.interval)


def sensor_of(gpu: Gpu | None, fresh: Callable[[], View] = View) -> Sensor:
    """The temperature of a GPU, or of the processor where there is none.

    fresh: makes a View; each reading takes a new one, because a View remembers what commands said.
    """
    if gpu is None:
        return lambda: cpu_temperature(fresh())

    def read() -> float | None:
        view = fresh()
        found: dict[str, float] = {}
        for path in view.glob(f"/sys/bus/pci/devices/{gpu.pci}/hwmon/hwmon*/temp*_input") if gpu.pci else ():
            label = view.read(path.replace("_input", "_label")) or "edge"
            found[label] = number(view.read(path)) / 1000
        if not found:
            readings = read_telemetry(view).readings
            match = [r for r in readings if r.device == str(gpu.index)] or list(readings)
            temperatures = [t for r in match if (t := _edge_or_junction(r.sensors)) is not None]
            return max(temperatures, default=None)
        return _edge_or_junction(found)

    return read


def _edge_or_junction(sensors: Any) -> float | None:
    for place in ("edge", "hotspot", "junction"):
        if place in sensors:
            return float(sensors[place])
    return max((value for place, value in sensors.items() if not place.startswith("mem")), default=None)


def guard_for(section: MonitorSection, gpu: Gpu | None, sensor: Sensor | None = None) -> ThermalGuard | None:
    """The guard that a configuration asks for; None where it is off, or where nothing tells a temperature.

    gpu: that trains, None for the CPU.  sensor: instead of the device's own.
    """
    maximum = section.max_temperature_c
    if maximum is None:
        maximum = GPU_LIMIT if gpu is not None else 0.0
    if not maximum:
        return None
    critical = section.critical_temperature_c or maximum + CRITICAL_ABOVE
    if sensor is None:
        read = sensor_of(gpu)
        if read() is None:
            if section.max_temperature_c is not None:
                warn("monitor.max_temperature_c is set, but nothing tells a temperature here: no thermal guard")
            return None
        sensor = BackgroundSensor(read, section.temperature_interval_s)
    return ThermalGuard(sensor, maximum, critical, section.temperature_hysteresis_c, section.temperature_interval_s)
