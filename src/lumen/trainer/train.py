"""From a RunConfig to a RunResult: find what to resume, build, train, finish."""

from __future__ import annotations

import os

from lumen.checkpoint import Store
from lumen.core.errors import ConfigError
from lumen.core.log import say
from lumen.trainer.build import build
from lumen.trainer.config import RunConfig
from lumen.trainer.finish import finish, write_run_files
from lumen.trainer.loop import Loop
from lumen.trainer.run import RunResult
from lumen.trainer.saving import clear_for_fresh_start, find_resume


def run_training(config: RunConfig, *, resolved: str) -> RunResult:
    """Train as configured.  resolved: the resolved configuration as text, written beside the run.

    Raises LumenError with place and remedy for mistakes in configuration, data, model or checkpoint.
    """
    if config.output_dir is None:
        raise ConfigError("`output_dir` must be set", where="output_dir", fix="add `output_dir: runs/my-first`")
    if not config.do_train:
        raise ConfigError("do_train is false", where="do_train", fix="use `lumen eval` to evaluate only")
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        raise ConfigError(
            f"a launcher started {world} processes, but training on several devices is not built yet",
            where="WORLD_SIZE",
            fix="start one process: `lumen train FILE`, without torchrun or accelerate launch",
        )
    store = Store(config.output_dir, limit=config.save_total_limit)
    for name in store.sweep():
        say(f"removed {name}, left by an interrupted save")
    resume = find_resume(config, store)
    run = build(config, resume.directory if resume else None)
    if resume is None:
        clear_for_fresh_start(config, store)
    loop = Loop(run, store, resume)
    write_run_files(run, resolved)
    stop = loop.train()
    return finish(loop, stop)
