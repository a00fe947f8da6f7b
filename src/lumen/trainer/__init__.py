"""RunConfig, build (the order of transformations), the loop, schedule, guard, held-out loss."""
