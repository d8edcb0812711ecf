"""Nomic-BERT, as transformers saves it and as Nomic released it, with a configuration under GPT-2's field names.

Of those fields some have another name in transformers and some have one value that transformers' class can do. They are
read and checked here: transformers passes over them and takes its defaults, which fit nomic-embed-text-v1.5 alone.
Source of the meanings: modeling_hf_nomic_bert.py in nomic-ai/contrastors; of the key names: transformers'
conversion_mapping.py.
"""

from typing import Any

from transformers import NomicBertConfig, NomicBertForSequenceClassification, NomicBertModel, PreTrainedConfig

from export.families.family import Classifier, Family
from export.families.refusals import refuse_rotary
from export.families.rotary import AUTHORS_NAMES, FREQUENCIES, QUERY_KEY_VALUE
from export.weights import KeyRules

_FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
_ONLY: dict[str, tuple[object, ...]] = {
    "activation_function": ("swiglu",),
    "prenorm": (False,),
    "parallel_block": (False,),
    "use_rms_norm": (False, None),
    "causal": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "moe_every_n_layers": (0, None),
    "num_experts": (0, None),
}


def _rename_fields(content: dict[str, Any]) -> dict[str, Any]:
    """The configuration with transformers' names beside Nomic's, where it has only the latter."""
    if "n_embd" not in content:
        return content
    known = {new: content[old] for old, new in _FIELDS.items() if old in content}
    # Past the positions that it was trained on, Nomic's code rotates by the length of the batch.
    trained = content.get("max_trained_positions", 2048)
    limit = {"max_position_embeddings": min(trained, content.get("max_position_embeddings", trained))}
    if content.get("rope_parameters"):
        known.pop("rope_theta", None)
    return known | content | limit


def _refuse_other_kinds(config: PreTrainedConfig) -> str | None:
    """What transformers' class would compute in another way, or what the two sets of names disagree on."""
    for name, supported in _ONLY.items():
        if (found := getattr(config, name, supported[0])) not in supported:
            return f"{name} is {found!r}, which transformers' NomicBert cannot do; supported: {supported[0]!r}"
    for old, new in _FIELDS.items():
        expected = config.rope_parameters["rope_theta"] if new == "rope_theta" else getattr(config, new)
        if (found := getattr(config, old, expected)) != expected:
            return f"{old} is {found} and {new} {expected}; correct one of them in config.json"
    return None


NOMIC_BERT = Family(
    model_class=NomicBertModel,
    config_class=NomicBertConfig,
    classifier=Classifier(NomicBertForSequenceClassification),
    keys=KeyRules(
        prefix="nomic_bert.",
        unused_prefixes=("pooler.", "cls.", "classifier."),
        buffers=(FREQUENCIES,),
        renames=(
            *AUTHORS_NAMES,
            ("attn.out_proj", "self_attn.o_proj"),
            ("fc11", "up_proj"),
            ("fc12", "gate_proj"),
            ("fc2", "down_proj"),
        ),
        splits=(("attn.Wqkv", QUERY_KEY_VALUE),),
    ),
    refusals=(_refuse_other_kinds, refuse_rotary),
    rewrite=_rename_fields,
    ported_from=frozenset({"configuration_hf_nomic_bert", "modeling_hf_nomic_bert"}),
)
