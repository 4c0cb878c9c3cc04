"""The parts of scripts/gpu_check: generators part(dry_run, only) of result rows, each in a process of its own."""
