"""What sentence-transformers' files say of the way from token vectors to a sentence's: read, never guessed.

A wrong pooling gives vectors that look right and rank wrong. So the pipeline, the pooling and the dense layers are read
from modules.json and each module's config.json. Where they are missing the user must say; where they and the user
disagree the export stops. Modules and orders that are not understood are refused by name.
"""

import re
from typing import Any

from torch import nn

from export.checkpoint import Checkpoint, Module, read_json
from export.errors import ExportError
from export.heads import Dense, EmbeddingHead
from export.pooling import POOLINGS
from export.weights import KeyRules, load_weights
from service.bundle import Pooling

_PIPELINE = re.compile(r"(Transformer( Pooling( Dense)*)?( Normalize)?)?")

# sentence-transformers' names, in both layouts of 1_Pooling/config.json that it has written.
_FLAGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
}
_NAMES: dict[str, Pooling] = {
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
# Named in Dense's config.json by their dotted path, and made without arguments, as sentence-transformers does.
_ACTIVATION_PACKAGES = ("torch.nn", "torch.nn.modules.activation", "torch.nn.modules.linear")
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "Identity": nn.Identity,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
}
_POOLED = "sentence_embedding"


def choose_embedding(
    checkpoint: Checkpoint, asked_pooling: Pooling | None = None, asked_normalize: bool | None = None
) -> EmbeddingHead:
    """What the checkpoint declares, or what the user asked for where it declares nothing. Raises `ExportError`."""
    pooling, dense, normalize = _read_pipeline(checkpoint)
    if None not in (pooling, asked_pooling) and pooling != asked_pooling:
        raise _contradiction(checkpoint, f"--pooling {asked_pooling}", f"pools by {pooling}")
    if None not in (normalize, asked_normalize) and normalize != asked_normalize:
        says = "normalizes" if normalize else "does not normalize"
        raise _contradiction(checkpoint, "--normalize" if asked_normalize else "--no-normalize", says)
    pooling, normalize = pooling or asked_pooling, asked_normalize if normalize is None else normalize
    if pooling is None or normalize is None:
        raise ExportError(
            f"{checkpoint.path}: it does not say how to make one vector of a sequence's; "
            f"give --pooling {'|'.join(POOLINGS)} and --normalize or --no-normalize"
        )
    return EmbeddingHead(pooling, normalize, dense)


def read_prompts(checkpoint: Checkpoint) -> tuple[dict[str, str], str]:
    """The prompts that clients put before a text, by name, and the name of the default one, "" if there is none."""
    path = checkpoint.path / "config_sentence_transformers.json"
    content = read_json(path) if path.is_file() else {}
    prompts, default = content.get("prompts") or {}, content.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ExportError(f"{path}: prompts is {prompts!r}; it must map names to texts")
    if default and default not in prompts:
        known = ", ".join(prompts) or "none"
        raise ExportError(f"{path}: default_prompt_name is {default!r}, the prompts are {known}; correct one of them")
    return prompts, default


def _contradiction(checkpoint: Checkpoint, option: str, says: str) -> ExportError:
    return ExportError(f"{checkpoint.path}: {option} contradicts the checkpoint, which {says}; leave it out")


def _read_pipeline(checkpoint: Checkpoint) -> tuple[Pooling | None, list[Dense], bool | None]:
    """Pooling, dense layers and whether to normalize; None where nothing is declared."""
    kinds = [module.kind for module in checkpoint.modules]
    if not _PIPELINE.fullmatch(" ".join(kinds)):
        raise ExportError(
            f"{checkpoint.path}: its modules are {' > '.join(kinds)}; "
            "supported: Transformer > Pooling [> Dense ...] [> Normalize]"
        )
    pooling: Pooling | None = None
    dense: list[Dense] = []
    width = checkpoint.hidden_size
    for module in checkpoint.modules:
        if module.kind == "Pooling":
            pooling = _read_pooling(module, width)
        elif module.kind == "Dense":
            dense.append(_read_dense(module, width))
            width = dense[-1].linear.out_features
        elif module.kind == "Normalize" and (file := module.path / "config.json").is_file():
            _require_pooled(read_json(file), module)
    return pooling, dense, "Normalize" in kinds if kinds else None


def _read_pooling(module: Module, hidden_size: int) -> Pooling:
    path = module.path / "config.json"
    config = read_json(path)
    width = config.get("word_embedding_dimension", config.get("embedding_dimension", hidden_size))
    if width != hidden_size:
        raise ExportError(f"{path}: it pools {width} components, the model has {hidden_size}; correct one of them")
    if config.get("include_prompt") is False:
        raise ExportError(
            f"{path}: include_prompt is false: prompts are left out of the pooling, "
            "and a server of token ids does not know which of them are a prompt"
        )
    modes = _declared_modes(config)
    supported = [_FLAGS.get(mode, _NAMES.get(mode)) for mode in modes]
    if len(supported) != 1 or supported[0] is None:
        raise ExportError(f"{path}: pooling is {' + '.join(modes) or 'none'}; supported: one of {', '.join(POOLINGS)}")
    return supported[0]


def _declared_modes(config: dict[str, Any]) -> list[str]:
    if "pooling_mode" in config:
        mode = config["pooling_mode"]
        return [mode] if isinstance(mode, str) else [str(name) for name in mode or ()]
    return [key for key, is_on in config.items() if key.startswith("pooling_mode_") and is_on]


def _read_dense(module: Module, in_features: int) -> Dense:
    path = module.path / "config.json"
    config = read_json(path)
    _require_pooled(config, module)
    if config.get("use_residual"):
        raise ExportError(f"{path}: use_residual is true; supported: dense layers without it")
    if config.get("in_features") != in_features:
        raise ExportError(
            f"{path}: in_features is {config.get('in_features')!r}, but {in_features} come in; correct it"
        )
    out_features, has_bias = config.get("out_features"), config.get("bias", True)
    if type(out_features) is not int or out_features < 1 or type(has_bias) is not bool:
        raise ExportError(
            f"{path}: out_features is {out_features!r} and bias {has_bias!r}; they must be a number and true or false"
        )
    layer = Dense(in_features, out_features, bias=has_bias, activation=_read_activation(config, module))
    load_weights(module.path, layer, KeyRules(prefix="", unused_prefixes=(), buffers=(), renames=()))
    return layer.eval()


def _read_activation(config: dict[str, Any], module: Module) -> nn.Module:
    """Without a name it is Tanh, sentence-transformers' own default."""
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    package, _, kind = name.rpartition(".")
    if package not in _ACTIVATION_PACKAGES or kind not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ExportError(f"{module.path / 'config.json'}: activation_function is {name!r}; supported: torch's {known}")
    return _ACTIVATIONS[kind]()


def _require_pooled(config: dict[str, Any], module: Module) -> None:
    """Newer modules can work on token vectors, or leave their result somewhere else."""
    for key in ("module_input_name", "module_output_name"):
        if (name := config.get(key)) not in (None, _POOLED):
            raise ExportError(f"{module.path / 'config.json'}: {key} is {name!r}; supported: {_POOLED}")
