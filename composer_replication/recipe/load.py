"""Reading a recipe: YAML and `key=value` overrides in, one checked frozen value out.

Invariant: what comes out has no unknown key, no wrong type and no setting that the core would refuse, so that a mistake
costs a sentence and not a started fleet. Every RecipeError names the key and, where there is one, the file and line.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from composer_replication.errors import RecipeError
from composer_replication.recipe import schema
from composer_replication.recipe.check import check
from composer_replication.recipe.credentials import refuse_credentials
from composer_replication.recipe.messages import Place, nearest
from composer_replication.recipe.schema import Recipe

__all__ = ["claim_folder", "load_recipe", "recipe_from", "to_yaml", "with_group"]


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe in a YAML file, with `key=value` overrides ("training.steps=120") put over it. Raises RecipeError."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RecipeError(
            f"there is no recipe {file}; give a YAML file, for example recipes/quickstart.yaml"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it isn't UTF-8 text"
        raise RecipeError(f"the recipe {file} can't be read: {why}") from error
    return recipe_from(text, overrides, file=str(file))


def recipe_from(text: str, overrides: Iterable[str] = (), *, file: str = "") -> Recipe:
    """As `load_recipe`, from the YAML text itself; `file` is its name in messages."""
    OmegaConf, OmegaConfError, yaml = _omegaconf()
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        written = OmegaConf.create(text) if text.strip() else OmegaConf.create({})
    except (yaml.YAMLError, OmegaConfError) as error:
        raise RecipeError(f"{file or 'the recipe'} isn't valid YAML: {error}") from error
    if not OmegaConf.is_dict(written):
        raise RecipeError(f"{file or 'the recipe'} must be a mapping of sections (name, model, data, ...)")
    dotted = [_long(override) for override in overrides]
    for override in dotted:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"{override!r} isn't an override: write key=value, for example training.steps=120")
        try:
            yaml.load(value, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:  # the value isn't shown: it may be a password
            raise RecipeError(
                f"{key}: the value isn't valid YAML; text with such signs needs quotes within the shell's: "
                f"\"{key}='...'\""
            ) from error
    place = Place(file, _lines(root), frozenset(o.partition("=")[0] for o in dotted))
    try:
        over = OmegaConf.from_dotlist(dotted)
        parts: list[dict[str, Any]] = []
        first, second = (_spelt_out(OmegaConf.to_container(part, resolve=False)) for part in (written, over))
        for plain in (first, _with_groups_of(first, second)):
            refuse_credentials(plain, "", place)  # before a key like that is only called unknown
            _refuse_unknown(plain, Recipe, "", place)
            parts.append(_rename_class(plain))
        _count_replicas(parts, place)
        target = OmegaConf.structured(Recipe)
        _unlock(target, OmegaConf)
        merged = OmegaConf.merge(target, *(OmegaConf.create(part) for part in parts))
        recipe = OmegaConf.to_object(merged)
    except OmegaConfError as error:
        raise RecipeError(_explain(error, place)) from error
    assert isinstance(recipe, Recipe)
    check(recipe, place)
    return recipe


def to_yaml(recipe: Recipe) -> str:
    """The recipe as YAML that `recipe_from` reads back to an equal value: every default filled in."""
    OmegaConf, _, _ = _omegaconf()
    values = asdict(recipe)
    for section in ("model", "data"):
        values[section] = {("class" if k == "class_" else k): v for k, v in values[section].items()}
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(values)))


def claim_folder(recipe: Recipe) -> Recipe:
    """Make the run's folder, `output` or the first free of `output-2`, `output-3`, ...; fill `output`, `store.uri` and
    `logging.group`.

    Each launch therefore has a folder of its own, and two that start together don't meet.
    """
    first = Path(recipe.folder).expanduser().absolute()
    number = 1
    while True:
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
        except OSError as error:
            raise RecipeError(f"output: the folder {folder} can't be made: {error.strerror}") from error
    store = recipe.store if recipe.store.uri else replace(recipe.store, uri=(folder / "store").as_uri())
    return with_group(replace(recipe, output=str(folder), store=store))


def with_group(recipe: Recipe) -> Recipe:
    """What all replicas of a run log under, wherever they are: if nothing else is said, its folder's name."""
    if recipe.logging.group is not None or not recipe.logging.loggers:
        return recipe
    return replace(recipe, logging=replace(recipe.logging, group=Path(recipe.folder).name))


def _omegaconf() -> tuple[Any, Any, Any]:
    try:
        import yaml
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError as error:
        raise RecipeError(
            "recipes need OmegaConf: pip install 'composer-replication[recipe]' (and [lightning] to train)"
        ) from error
    return OmegaConf, OmegaConfBaseException, yaml


def _unlock(node: Any, OmegaConf: Any) -> None:
    """OmegaConf makes frozen dataclasses read-only, and its older versions then won't merge into them."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        child = node._get_node(key)
        if OmegaConf.is_config(child) and child is not None:
            _unlock(child, OmegaConf) if OmegaConf.is_dict(child) else None


def _lines(node: Any, prefix: str = "") -> dict[str, int]:
    found: dict[str, int] = {}
    for key, value in getattr(node, "value", None) or ():
        if hasattr(key, "value"):
            dotted = f"{prefix}{key.value}"
            found[dotted] = key.start_mark.line + 1
            if type(value).__name__ == "MappingNode":
                found.update(_lines(value, f"{dotted}."))
            elif type(value).__name__ == "SequenceNode":
                for index, one in enumerate(value.value):
                    found[f"{dotted}.{index}"] = one.start_mark.line + 1
                    if type(one).__name__ == "MappingNode":
                        found.update(_lines(one, f"{dotted}.{index}."))
    return found


def _names(section: type) -> list[str]:
    return ["class" if f.name == "class_" else f.name for f in fields(section)]


def _section(section: type, key: str) -> type | None:
    for f in fields(section):
        if f.name == key and isinstance(f.type, str) and f.type.endswith("Section"):
            return getattr(schema, f.type)
    return None


def _refuse_unknown(values: Any, section: type, prefix: str, place: Place) -> None:
    assert is_dataclass(section)
    if not isinstance(values, Mapping):
        if values is None or prefix == "":
            return
        key = prefix[:-1]
        raise RecipeError(f"{place.of(key)} must be a mapping with {', '.join(_names(section))}, not {values!r}")
    known = _names(section)
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if key not in known:
            hint = _elsewhere(str(key)) or nearest(str(key), known) or f" It may hold {', '.join(known)}."
            where = f"section {prefix[:-1]!r}" if prefix else "a recipe"
            raise RecipeError(f"{place.of(dotted)}: {where} has no key {key!r}.{hint}")
        inner = _section(section, str(key))
        if inner is not None:
            if value is None:
                raise RecipeError(f"{place.of(dotted)}: the section is empty; leave it out or fill it in")
            _refuse_unknown(value, inner, f"{dotted}.", place)
        elif section is schema.FleetSection and key == "groups":
            if not isinstance(value, list):
                raise RecipeError(f"{place.of(dotted)} must be a list of {{executor, count, options}}, not {value!r}")
            for index, group in enumerate(value):
                _refuse_unknown(group, schema.GroupSection, f"{dotted}.{index}.", place)


def _elsewhere(key: str) -> str:
    """The right section for a key that was put into the wrong one."""
    for f in fields(Recipe):
        inner = _section(Recipe, f.name)
        if inner is not None and key in _names(inner):
            return f" Did you mean '{f.name}.{key}'?"
    return ""


def _rename_class(plain: dict[str, Any]) -> dict[str, Any]:
    """`class` can't be the name of a field in Python; the schema calls it `class_`."""
    for section in ("model", "data"):
        if isinstance(plain.get(section), dict) and "class" in plain[section]:
            plain[section]["class_"] = plain[section].pop("class")
    return plain


def _long(override: str) -> str:
    """`executor=modal` is `executor.name=modal`."""
    key, equals, value = override.partition("=")
    return f"executor.name={value}" if equals and key.strip() == "executor" and value[:1] not in "{" else override


def _spelt_out(plain: Any) -> Any:
    """`executor: modal` is `executor: {name: modal}`."""
    if isinstance(plain, dict) and isinstance(plain.get("executor"), str):
        plain["executor"] = {"name": plain["executor"]}
    return plain


def _with_groups_of(written: Any, over: Any) -> Any:
    """`fleet.groups.0.count=3` changes one value of the list in the file."""
    groups, changed = ((part.get("fleet") or {}).get("groups") for part in (written, over))
    if not isinstance(groups, list) or not isinstance(changed, dict):
        return over
    whole = copy.deepcopy(groups)
    for key, values in changed.items():
        if not str(key).isdigit() or int(key) >= len(whole) or not isinstance(values, dict):
            raise RecipeError(f"fleet.groups.{key}: the recipe has groups 0 to {len(whole) - 1}")
        group = whole[int(key)]
        if isinstance(group, dict):
            options = {**(group.get("options") or {}), **(values.get("options") or {})}
            group |= {**values, **({"options": options} if options else {})}
    over["fleet"]["groups"] = whole
    return over


def _count_replicas(parts: Sequence[dict[str, Any]], place: Place) -> None:
    """With groups, `fleet.replicas` is their sum; said otherwise, it is refused."""
    fleets = [part.get("fleet") or {} for part in parts]
    giving = [index for index, fleet in enumerate(fleets) if fleet.get("groups")]
    if not giving:
        return
    counts = [group.get("count", 1) for group in fleets[giving[-1]]["groups"]]
    if not all(isinstance(count, int) for count in counts):
        return  # the merge says so
    later = reversed(fleets[giving[-1] :])  # groups on the command line go over a number in the file
    said = next((fleet["replicas"] for fleet in later if fleet.get("replicas") is not None), sum(counts))
    if said != sum(counts):
        raise RecipeError(
            f"{place.of('fleet.replicas')} is {said}, but fleet.groups are {sum(counts)} replicas together "
            f"({' + '.join(map(str, counts))}): leave it out, or correct the groups' count"
        )
    parts[-1].setdefault("fleet", {})["replicas"] = said


def _escaped(value: Any) -> Any:
    """Literal `${` stays literal when the file is read again."""
    if isinstance(value, dict):
        return {k: _escaped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escaped(v) for v in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _explain(error: Any, place: Place) -> str:
    key = str(getattr(error, "full_key", None) or "").replace("class_", "class")
    first = str(error).splitlines()[0].replace("class_", "class")
    found = re.match(
        r"Value '(?P<value>.*)' (of type '.*' could not be converted to|is not a valid) (?P<kind>\w+)", first
    )
    if found:
        kinds = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "bool": "true or false"}
        return f"{place.of(key)} must be {kinds.get(found['kind'], found['kind'])}, not {found['value']!r}"
    return f"{place.of(key)}: {first}" if key else f"{place.file or 'the recipe'}: {first}"
