"""The parts of scripts/gpu_check. Each is a generator part(dry_run, only) of result rows, run alone in its own process."""
