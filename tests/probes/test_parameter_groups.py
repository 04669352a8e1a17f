"""Which block and part each parameter belongs to, in every family."""

from reference.gradients import single_images
from wellposed.anatomy import blocks
from wellposed.anatomy.seam import is_seamed
from wellposed.probes.parameter_groups import parameter_groups
from zoo import BY_NAME, Case, each_kind, families


@each_kind
def test_every_parameter_is_in_one_group_and_parts_make_up_their_block(case: Case) -> None:
    model, x = case.model(), case.input(1)
    image = single_images(case, x)[0]
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    parts, whole = parameter_groups(model, image, "parts"), parameter_groups(model, image, "blocks")
    for groups in (parts, whole):
        assert sorted(name for group in groups for name in group.parameters) == sorted(trainable)
    for block in blocks(model):
        own = {f"{block.name}.{name}" for name, _ in block.module.named_parameters()} & trainable
        (alone,) = [group for group in whole if group.block == block.index]
        assert set(alone.parameters) == own
        assert alone.module == block.name
        assert {name for g in parts if g.block == block.index for name in g.parameters} == own
        assert {g.part for g in parts if g.block == block.index} == set(block.row.roles)
    assert not any(is_seamed(module) for module in model.modules())


_ATTENTION_AND_FFN = {
    "timm vit": ("norm1 attn", "norm2 mlp"),
    "timm deit3": ("norm1 attn ls1", "norm2 mlp ls2"),
    "timm vit post-norm": ("norm1 attn", "norm2 mlp"),
    "timm eva": ("norm1 attn", "norm2 mlp"),
    "timm beit": ("norm1 attn gamma_1", "norm2 mlp gamma_2"),
    "timm swinv2": ("norm1 attn", "norm2 mlp"),
    "timm cait": ("norm1 attn gamma_1", "norm2 mlp gamma_2"),
    "timm mixer": ("norm1 mlp_tokens", "norm2 mlp_channels"),
    "timm resmlp": ("norm1 linear_tokens ls1", "norm2 mlp_channels ls2"),
    "hf vit": ("layernorm_before attention", "layernorm_after mlp"),
    "hf dinov2": ("norm1 attention layer_scale1", "norm2 mlp layer_scale2"),
    "hf beit": (
        "layernorm_before attention relative_position_bias lambda_1",
        "layernorm_after intermediate output mlp lambda_2",
    ),
    "torchvision vit": ("ln_1 self_attention", "ln_2 mlp"),
    "torch encoder": ("self_attn norm1", "linear1 linear2 norm2"),
    "torch encoder pre-norm": ("self_attn norm1", "linear1 linear2 norm2"),
}


@families(*_ATTENTION_AND_FFN)
def test_attention_and_ffn_hold_the_right_modules(case: Case) -> None:
    model = case.model()
    first, second, *_ = parameter_groups(model, single_images(case, case.input(1))[0], "parts")
    name = blocks(model)[0].name
    for group, expected in zip((first, second), _ATTENTION_AND_FFN[case.name], strict=True):
        children = {parameter.removeprefix(f"{name}.").split(".")[0] for parameter in group.parameters}
        assert children <= set(expected.split())
        assert len(children) >= 2
    assert second.part == "ffn"


def test_xcit_has_a_third_part_and_convmixer_one() -> None:
    for name, expected in (("timm xcit", {"attention", "local", "ffn"}), ("timm convmixer", {"mixer"})):
        case = BY_NAME[name]
        groups = parameter_groups(case.model(), case.input(1), "parts")
        assert {group.part for group in groups if group.block == 0} == expected
