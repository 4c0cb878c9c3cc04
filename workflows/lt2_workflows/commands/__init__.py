"""The commands of `lt2` that lt2_workflows.cli does not hold itself."""
