"""The parts of scripts/gpu_check. Each is a function part(dry_run) -> rows, and runs alone in its own process."""
