"""`lt2 sweep`: a shipped sweep, or a grid over any recipe. Everything heavy is imported by the command."""

from __future__ import annotations

from typing import Annotated, Any

import typer

SHIPPED = ("ratio", "pattern", "level", "gate", "mixers", "loops", "state_recall")

NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="ratio, pattern, level, gate, mixers, loops, state_recall, some with a size (ratio:1.3b); or a RECIPE.",
    ),
]


def sweep_workflow(name: str, set_: list[str], grid: list[str], seeds: str | None, options: dict[str, Any]) -> Any:
    """The workflow that `lt2 sweep` runs. Raises ConfigError for any mistake."""
    from lt2.config import ConfigError
    from lt2_platform.wording import nearest
    from lt2_workflows.loading import load_workflow, shipped_recipes, workflow_from_record
    from lt2_workflows.overrides import apply_overrides

    preset, word, recipes = f"sweep_{name}", name.partition(":")[0], shipped_recipes()
    if word.isidentifier() and word not in {*SHIPPED, *recipes}:
        raise ConfigError(f"unknown recipe {word!r}{nearest(word, [*SHIPPED, *recipes])}")
    base = load_workflow(preset if preset.partition(":")[0] in recipes else name)
    if [(step, config.type) for step, config in base.configs.items()] == [("sweep", "sweep")]:
        record = base.record()
    else:
        if not grid and seeds is None:
            raise ConfigError(f"{name} is not a sweep ({', '.join(SHIPPED)}); give --grid or --seeds as well")
        raw = {"type": "sweep", "steps": base.record()["steps"], "seed_keys": seed_keys(base)}
        record = {"workflow": f"sweep_{base.name}", "recipe_file": base.recipe_file, "steps": {"sweep": raw}}
    step = record["steps"]["sweep"]
    own = [item for item in set_ if item.startswith("sweep.")]
    apply_overrides(step["steps"], [parsed(item, "--set") for item in set_ if item not in own])
    chosen: dict[str, list[Any]] = {}
    for key, values in (parsed(item, "--grid") for item in grid):
        if not isinstance(values, list):
            raise ConfigError(f"--grid {key}: give a list of values, e.g. --grid '{key}=[1, 2]'")
        if key in chosen:
            raise ConfigError(f"--grid {key} is given more than once; put its values in one list")
        chosen[key] = values
    if chosen:
        step["grid"] = {**step.get("grid", {}), **chosen}
    if seeds is not None:
        step["seeds"] = seeds.split(",")
    if options.get("concurrent") is not None:
        step.setdefault("resources", {})["concurrent"] = options["concurrent"]
    if options.get("asha") is not None:
        step["scheduler"] = {"type": "asha", "grace_steps": options["asha"]}
    apply_overrides(record["steps"], [parsed(item, "--set") for item in own])
    return workflow_from_record(record, source=f"sweep {name}")


def parsed(text: str, option: str) -> tuple[str, Any]:
    from lt2.config import ConfigError
    from lt2_workflows.overrides import parse_override

    try:
        return parse_override(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--set", option, 1)) from None


def seed_keys(base: Any) -> list[str]:
    """`train.seed` (and `train.init_seed`, where a recipe gives one) of every step that trains, or its `seed`."""
    found = []
    for name, config in base.configs.items():
        train = getattr(config, "train", None)
        if train is not None:
            found += [f"{name}.train.seed"] + [f"{name}.train.init_seed"] * (train.init_seed is not None)
        elif "seed" in type(config).model_fields and config.type != "prepare":
            found.append(f"{name}.seed")
    return found
