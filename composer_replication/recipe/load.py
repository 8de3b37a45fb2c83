"""Reading a recipe: YAML and `key=value` overrides in, one checked frozen value out.

Invariant: what comes out has no unknown key, no wrong type and no setting that the core would refuse, so that a mistake
costs a sentence and not a started fleet. Every RecipeError names the key and, where there is one, the file and line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from composer_replication.errors import RecipeError
from composer_replication.recipe import schema
from composer_replication.recipe.check import check
from composer_replication.recipe.messages import Place, nearest
from composer_replication.recipe.schema import Recipe

__all__ = ["claim_folder", "load_recipe", "recipe_from", "to_yaml"]

_CREDENTIAL = re.compile(
    r"(^|_)(password|passwd|passphrase|secret|secrets|credential|credentials|api_?key|access_?key|private_?key"
    r"|key_?id|account_?key|connection_?string|sas_?token|(hf|auth|access|session|bearer|api|security)_?token)($|_)"
    r"|^token$",
    re.IGNORECASE,
)
# In names of environment variables, where a shorter word is enough.
_SECRET_VARIABLE = re.compile(
    r"(^|_)(pat|pass|pw|keys?|tokens?|creds?|sas|cookie)($|_)|token$|password|passwd|passphrase|secret|credential|apikey",
    re.IGNORECASE,
)
# Part of a connection string.
_SECRET_PART = re.compile(
    r"(^|[;,&?\s])(password|passwd|pwd|account_?key|access_?key|secret_?key|api_?key|shared_?access_?(key|signature))"
    r"\s*=\s*[^\s;]",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"[^/.~:@][^/:@]+:[^@]*@")  # name:password@host, where a path or a scheme should begin
_SIGNATURE = re.compile(r"^sig$|signature|^x-(amz|goog)-|accesskeyid$", re.IGNORECASE)  # of pre-signed links


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
    dotted = list(overrides)
    for override in dotted:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"{override!r} isn't an override: write key=value, for example training.steps=120")
    place = Place(file, _lines(root), frozenset(o.partition("=")[0] for o in dotted))
    try:
        over = OmegaConf.from_dotlist(dotted)
        for part in (written, over):
            plain = OmegaConf.to_container(part, resolve=False)
            _refuse_unknown(plain, Recipe, "", place)
            _refuse_credentials(plain, "", place)
        target = OmegaConf.structured(Recipe)
        _unlock(target, OmegaConf)
        merged = OmegaConf.merge(target, *(_rename_class(p, OmegaConf) for p in (written, over)))
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
    """Make the run's folder, `output` or the first free of `output-2`, `output-3`, ...; fill `output` and `store.uri`.

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
    return replace(recipe, output=str(folder), store=store)


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


def _elsewhere(key: str) -> str:
    """The right section for a key that was put into the wrong one."""
    for f in fields(Recipe):
        inner = _section(Recipe, f.name)
        if inner is not None and key in _names(inner):
            return f" Did you mean '{f.name}.{key}'?"
    return ""


def _refuse_credentials(values: Any, prefix: str, place: Place) -> None:
    if isinstance(values, Mapping):
        for key, value in values.items():
            dotted = f"{prefix}{key}"
            if _CREDENTIAL.search(str(key)) and prefix != "executor.env.":
                raise RecipeError(
                    f"{place.of(dotted)} looks like a credential: recipes are copied and logged. Set it in the "
                    "environment of the process instead (cloud clients read it from there)"
                )
            if prefix == "executor.env." and (
                _CREDENTIAL.search(str(key)) or _SECRET_VARIABLE.search(str(key)) or _SECRET_PART.search(str(value))
            ):
                raise RecipeError(
                    f"{place.of(dotted)} looks like a credential: recipes are copied and logged. Set it in the "
                    "environment of the launcher instead, which passes it on to the replicas"
                )
            _refuse_credentials(value, f"{dotted}.", place)
    elif isinstance(values, str):
        head, separator, rest = values.partition("://")
        authority, query = rest.split("/", 1)[0], rest.partition("?")[2]
        place_name = prefix in ("store.uri.", "store.control.")
        if _SECRET_PART.search(values) or (place_name and not separator and _LOGIN.match(values)):
            raise RecipeError(
                f"{place.of(prefix[:-1])} holds what looks like a password: set it in the environment instead"
            )
        if not separator or " " in head:
            return
        names = [part.partition("=")[0] for part in query.replace(";", "&").split("&")]
        # A secret with a slash in it ends the authority early: what follows the colon is then no port.
        cut = "@" in rest and not re.fullmatch(r"[^:]*(:\d*)?", authority)
        if (
            cut
            or ":" in authority.rpartition("@")[0]
            or any(_CREDENTIAL.search(n) or _SIGNATURE.search(n) for n in names)
        ):
            raise RecipeError(
                f"{place.of(prefix[:-1])}: the URI holds a password or a signature; set it in the environment instead"
            )


def _rename_class(config: Any, OmegaConf: Any) -> Any:
    """`class` can't be the name of a field in Python; the schema calls it `class_`."""
    plain = OmegaConf.to_container(config, resolve=False)
    for section in ("model", "data"):
        if isinstance(plain.get(section), dict) and "class" in plain[section]:
            plain[section]["class_"] = plain[section].pop("class")
    return OmegaConf.create(plain)


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
